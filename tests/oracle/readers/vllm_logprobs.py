"""Runs where vLLM is installed: log-probabilities of given tokens, and a greedy continuation.

Argument: {"model": folder, "windows": [[token, ...], ...], "prompt": [token, ...], "steps": n}.
Prints {"logprobs": one per window and token but the first, "tokens": the continuation}.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.argv[1])
    longest = max(map(len, request["windows"]))
    llm = LLM(
        model=request["model"],
        dtype="bfloat16",
        max_model_len=max(1024, longest + 8),
        enforce_eager=True,
        max_num_seqs=4,
        skip_tokenizer_init=False,
    )
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([{"prompt_token_ids": w} for w in request["windows"]], score)
    logprobs = []
    for window, result in zip(request["windows"], scored, strict=True):
        after = zip(window[1:], result.prompt_logprobs[1:], strict=True)
        logprobs.append([entry[token].logprob for token, entry in after])
    greedy = SamplingParams(temperature=0, max_tokens=request["steps"], ignore_eos=True)
    answer = llm.generate([{"prompt_token_ids": request["prompt"]}], greedy)
    tokens = list(answer[0].outputs[0].token_ids)
    print()
    print(json.dumps({"logprobs": logprobs, "tokens": tokens}))


if __name__ == "__main__":
    main()
