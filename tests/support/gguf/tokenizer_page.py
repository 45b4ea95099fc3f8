"""A page to tokenize: prose, code, emoji, Chinese and more, with odd blanks. Written for this."""

PAGE = '''The river  ran past the mill;  nobody'd seen it so high since '87 (1987, that is).
"We'll need 12,500 sandbags," she said, "or 3.75 tonnes - WE'LL need them TODAY!" It's 100% true...

\tdef greet(name: str = "world") -> None:
\t    """Say hello."""
\t    for i in range(0x1F, 1_000_000, 0b11):
            print(f"{name!r:>10} == {i**2 // 7:08.3f}")  # TODO(me): i += 1

    if (a != b && c <= d || !e) { return &x->y[0]; }   // done
<div class="note" id='n1'>&nbsp;x<sup>2</sup></div>\r\n\r\nSELECT * FROM t WHERE id=42;


Größe, naïve café, Ærøskøbing, İstanbul, ﬁn, São Paulo, Привет, мир! Это тест №5. Ελληνικά; עברית, العربية،
हिन्दी में नमस्ते। ไทยแลนด์ កម្ពុជា 日本語のテキスト、カタカナ。한국어 문장입니다. Tiếng Việt
床前明月光，疑是地上霜。我在2024年3月15日买了3本书，共花了￥128.50元！“真的吗？”他问。繁體中文也要測試：龍、龜、鬱。
😀😃👍🏽 👨‍👩‍👧‍👦 🇩🇪🏳️‍🌈 ❤️‍🔥 ☃ ✅→⇒∑∫√π≈3.14159 ½ ² ™ © € £ … – — ‘quoted’ “double”
1 22 333 4444 55555 666666 7777777 88888888 999999999 1000000000000 1e-5 -17 +4
    \u00a0\u3000\u200b trailing blanks   \n \n\n  \n\t\t\n     x
'''  # noqa: E501
