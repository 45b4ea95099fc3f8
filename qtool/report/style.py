"""The page's own style: light, dark and paper, from 390 pixels up; nothing is fetched."""

CSS = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1c1e21; --faint: #5d646c; --rule: #d9dde2; --soft: #f4f6f8;
  --blue: #0072b2; --weak: #8a939c; --bad: #b3261e; --warn: #8a5a00; --good: #1b6e3c;
  --h0: #fdf1cf; --h1: #fbdc9a; --h2: #f6bf6c; --h3: #ec9d4b; --h4: #dc7a3d; --h5: #c3573f;
  --h6: #9f3a46; --h7: #75264a; --h8: #481846; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #15181c; --ink: #e7eaee; --faint: #a5adb6; --rule: #363c44; --soft: #1f242a;
  --blue: #56b4e9; --weak: #838d98; --bad: #ff9d94; --warn: #f0c060; --good: #7fd6a0;
  --h0: #2a1f38; --h1: #4a2348; --h2: #6f2b4c; --h3: #953a48; --h4: #b95241; --h5: #d6723f;
  --h6: #e9974c; --h7: #f5be6e; --h8: #fde7a9; } }
@media print { :root { color-scheme: light;
  --paper: #fff; --ink: #000; --faint: #444; --rule: #bbb; --soft: #fff;
  --blue: #0072b2; --weak: #777; --bad: #b3261e; --warn: #8a5a00; --good: #1b6e3c;
  --h0: #fdf1cf; --h1: #fbdc9a; --h2: #f6bf6c; --h3: #ec9d4b; --h4: #dc7a3d; --h5: #c3573f;
  --h6: #9f3a46; --h7: #75264a; --h8: #481846; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 70rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; padding-top: .6rem;
  border-top: 1px solid var(--rule); }
h3 { font-size: 1.02rem; margin: 1.5rem 0 .4rem; }
p { margin: .4rem 0; max-width: 46rem; }
.faint, figcaption { color: var(--faint); font-size: .9rem; }
nav { margin: .6rem 0; } nav a { display: inline-block;
  max-width: 100%; margin-right: 1rem; }
a { color: var(--blue); }
code, pre { font: .86em/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
pre { background: var(--soft); border: 1px solid var(--rule); border-radius: 4px; margin: .4rem 0;
  padding: .5rem .6rem; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } thead th { color: var(--faint); font-size: .85rem; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.n, td b { white-space: nowrap; } td.n small { display: block; }
thead th { vertical-align: bottom; overflow-wrap: normal; }
.any { overflow-wrap: anywhere; } tbody th { min-width: 3.6rem; }
small { color: var(--faint); font-weight: 400; }
table.pairs th { width: 14rem; font-weight: 500; color: var(--faint); }
.key { display: inline-block; min-width: 1.5em; padding: 0 .3em; border-radius: 1em;
  border: 1px solid var(--rule); font-size: .85em; text-align: center; font-weight: 600; }
details { margin: .4rem 0; } summary { cursor: pointer; color: var(--blue); font-size: .92rem; }
figure { margin: .6rem 0 1rem; } figcaption { margin-top: .25rem; }
svg.draw { display: block; overflow: visible; font-size: 12px; }
svg text { fill: var(--faint); font-family: inherit; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg text.name { fill: var(--ink); font-weight: 600; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--weak); }
svg .front { stroke: var(--blue); stroke-width: 1.5; }
svg .mark { fill: var(--blue); } svg .weak { fill: var(--weak); }
svg .range { stroke: var(--blue); stroke-width: 2; } svg .bar { fill: var(--blue); }
svg .part { stroke: var(--paper); stroke-width: 1; }
svg .cell { stroke: var(--paper); stroke-width: .5; }
svg.fine .cell { stroke: none; }
svg .none { fill: var(--soft); stroke: var(--rule); stroke-width: .5; }
.embedding { fill: #56b4e9; background: #56b4e9; }
.attention { fill: #e69f00; background: #e69f00; }
.mlp { fill: #009e73; background: #009e73; } .experts { fill: #0072b2; background: #0072b2; }
.norms { fill: #f0e442; background: #f0e442; } .head { fill: #cc79a7; background: #cc79a7; }
.other { fill: #999; background: #999; }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); } .h5 { fill: var(--h5); } .h6 { fill: var(--h6); } .h7 { fill: var(--h7); }
.h8 { fill: var(--h8); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .88rem; margin: .4rem 0; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  border: 1px solid var(--rule); vertical-align: -.05em; }
.rows { display: grid; grid-template-columns: fit-content(6.5rem) minmax(0, 1fr); gap: 3px .6rem;
  align-items: center; font-size: .88rem; }
.rows > span { text-align: right; line-height: 1.15; }
.ramp { display: grid; grid-template-columns: auto minmax(4rem, 12rem) auto; gap: .5rem;
  align-items: center; font-size: .88rem; color: var(--faint); margin-top: .4rem;
  justify-content: start; font-variant-numeric: tabular-nums; }
.sized { margin: .5rem 0; } .sized p { margin: 0 0 .1rem; font-size: .92rem; max-width: none; }
.many { display: grid; gap: .4rem 1.2rem; grid-template-columns: repeat(auto-fill,
  minmax(9.5rem, 1fr)); }
.many figure { margin: .3rem 0; } .many figcaption { font-size: .82rem; line-height: 1.3; }
.ends { display: flex; justify-content: space-between; font-size: .78rem; color: var(--faint); }
ul.findings { list-style: none; padding: 0; margin: .4rem 0; }
ul.findings li { padding: .35rem 0 .35rem .7rem; border-left: 4px solid var(--weak);
  margin: .35rem 0; }
ul.findings li.error { border-color: var(--bad); } ul.findings li.warning {
  border-color: var(--warn); }
.error b { color: var(--bad); } .warning b { color: var(--warn); } b.good { color: var(--good); }
b.bad { color: var(--bad); }
footer { margin-top: 2.5rem; padding-top: .6rem; border-top: 1px solid var(--rule); }
@media print, (min-width: 54.01rem) { table.cards tbody th, table.cards thead th:first-child {
  min-width: 10.5rem; } figure.chart { max-width: 46rem; } }
@media screen and (max-width: 54rem) {
  h1 { font-size: 1.35rem; } .wide { display: none; } table { font-size: .88rem; }
  th, td { padding-right: .45rem; }
  table.cards, table.cards tbody, table.cards tr, table.cards td, table.cards tbody th {
    display: block; width: auto; }
  table.cards thead { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); }
  table.cards tr { border: 1px solid var(--rule); border-radius: 6px; padding: .4rem .7rem;
    margin: .5rem 0; }
  table.cards td, table.cards tbody th { border: 0; padding: .12rem 0; text-align: left;
    white-space: normal; }
  table.cards td { display: grid; grid-template-columns: 9.8rem minmax(0, 1fr); gap: .6rem; }
  table.cards td::before { content: attr(data-label); color: var(--faint); }
  table.pairs, table.pairs tbody, table.pairs tr, table.pairs th, table.pairs td {
    display: block; width: auto; }
  table.pairs th { border: 0; padding-bottom: 0; font-size: .85rem; }
}
@media screen and (max-width: 22rem) { table { font-size: .76rem; } th, td { padding-right: .3rem; }
  tbody th { min-width: 2.6rem; } }
@page { margin: 14mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } table { font-size: 8.5pt; }
  th, td { padding-right: .4rem; } table.cards tbody th, table.cards thead th:first-child {
    min-width: 7rem; }
  nav, details.long { display: none; } summary { list-style: none; color: inherit;
    font-weight: 600; } details::details-content { content-visibility: visible;
    block-size: auto; }
  svg, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  figure, tr, .sized, li, pre { break-inside: avoid; } h2, h3 { break-after: avoid; }
  a { color: inherit; text-decoration: none; }
}
"""
