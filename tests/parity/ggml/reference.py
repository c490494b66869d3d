"""llama.cpp itself, by way of the wheel `xllamacpp`, in a process of its own: it ends the process where it gives up."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Answer:
    """The tokens that follow a prompt, each the most probable, and the log-probabilities of all tokens before each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray  # (tokens, vocabulary)


def installed() -> str | None:
    """Returns the version of the wheel, None where it is not installed."""
    try:
        return version("xllamacpp")
    except PackageNotFoundError:
        return None


def ask(path: Path, prompts: Sequence[Sequence[int]], n_predict: int, n_vocab: int, context: int) -> list[Answer]:
    """Returns what llama.cpp answers on the CPU, keys and values kept in float32, without its fused attention."""
    job = {"path": str(path), "prompts": [list(p) for p in prompts], "n_predict": n_predict, "n_vocab": n_vocab}
    return [Answer(a["prompt"], a["tokens"], np.array(a["logprobs"])) for a in _run(job | {"context": context})]


def vectors(path: Path, prompts: Sequence[Sequence[int]], pooling: str, context: int) -> list[np.ndarray]:
    """Returns each text's vector, the states of its tokens pooled so (`mean`, `cls`, `last`)."""
    job = {"path": str(path), "prompts": [list(p) for p in prompts], "pooling": pooling, "context": context}
    return [np.array(vector) for vector in _run(job)]


def tokens(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Returns each text's tokens, none put around it and none looked for in it."""
    return _run({"path": str(path), "texts": list(texts), "context": 64})


def _run(job: dict[str, Any]) -> list[Any]:
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    wrong = [line for line in done.stderr.splitlines() if "rror" in line or "ssert" in line]
    assert done.returncode == 0, "\n".join(wrong)[:2000]
    assert said, done.stderr[-2000:]
    return json.loads(said[0].removeprefix("ANSWERS "))


def _serve(job: dict[str, Any]) -> list[Any]:
    x: Any = import_module("xllamacpp")
    params = x.CommonParams()
    params.model.path = job["path"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = job["context"], 1, 0
    params.warmup = params.fit_params = False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if "texts" in job:
        server = x.Server(params)
        return [_tokenize(server.listening_address, text) for text in job["texts"]]
    if "pooling" in job:
        params.embedding, params.embd_normalize = True, -1
        params.pooling_type = getattr(x.llama_pooling_type, f"LLAMA_POOLING_TYPE_{job['pooling'].upper()}")
        server = x.Server(params)
        return [_embed(server, prompt) for prompt in job["prompts"]]
    server = x.Server(params)
    return [_complete(server, prompt, job) for prompt in job["prompts"]]


def _complete(server: Any, prompt: list[int], job: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    ask = {"prompt": prompt, "n_predict": job["n_predict"], "n_probs": job["n_vocab"], "temperature": 0.0}
    answer = server.handle_completions(ask | {"cache_prompt": False, "ignore_eos": False})
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if "choices" not in answer:
        raise RuntimeError(str(answer)[:500])
    content = answer["choices"][0]["logprobs"]["content"]
    rows = []
    for step in content:
        by_id = {one["id"]: one["logprob"] for one in step["top_logprobs"]}
        rows.append([by_id[i] for i in range(job["n_vocab"])])
    return {"prompt": prompt, "tokens": [step["id"] for step in content], "logprobs": rows}


def _tokenize(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
    asked = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.loads(answer.read())["tokens"]


def _embed(server: Any, prompt: list[int]) -> list[float]:  # noqa: ANN401
    answer = server.handle_embeddings({"input": [prompt]})
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if "data" not in answer:
        raise RuntimeError(str(answer)[:500])
    return answer["data"][0]["embedding"]


if __name__ == "__main__":
    print("ANSWERS " + json.dumps(_serve(json.loads(sys.stdin.read()))))
