"""lm-evaluation-harness, unmodified, gets mlx-lm's log-likelihoods from the gateway.

Install it with ``pip install torch==2.13.0 'lm_eval[api]' transformers``, in any environment whose
``lm_eval`` is on the path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest
import redis

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.queue.embedded import free_port
from tests.helpers.decoding import Loaded
from tests.helpers.gateway import is_healthy
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import wait_for

HARNESS = shutil.which("lm_eval")
pytestmark = pytest.mark.timeout(300)

DOCS: list[dict[str, Any]] = [
    {"context": "def double(x):\n    return", "choices": [" x * 2", " y + 7", " None"]},
    {"context": "for item in items:\n    print(", "choices": ["item)", "other)", "7)"]},
    {"context": "import", "choices": [" os", " 17", " return"]},
]
TASK = """
task: omlx_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a gateway beside a worker with the demo model."""
    port = free_port()
    command = [sys.executable, "-c", "from omlx_worker.cli import main; main()", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with redis_server() as server, redis.Redis.from_url(server.url) as connection:
        process = subprocess.Popen(
            [*command, "-m", "demo", "--redis-url", server.url, "--http", str(port)],
            env=environment,
        )
        try:
            wait_for(lambda: is_healthy(port, process) and connection.exists("omlx:models"), 120)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def split(context: str, choice: str) -> tuple[list[int], list[int]]:
    """The tokens of a context and of a choice after it, as the harness sends them."""
    encode = Loaded.demo().tokenizer.encode
    before = encode(context)
    return before, encode(context + choice)[len(before) :]


def scores(tokens: list[int]) -> tuple[list[float], list[int]]:
    """Mlx-lm's log-probabilities of all tokens but the first, and the likeliest in their places."""
    logits = Loaded.demo().network(mx.array([tokens]))[0, :-1].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own: Any = mx.take_along_axis(logprobs, mx.array(tokens[1:])[:, None], axis=-1)[:, 0].tolist()
    likeliest: Any = logits.argmax(axis=-1).tolist()
    return own, likeliest


def test_what_the_harness_asks_for_is_answered_token_by_token(url: str) -> None:
    pairs = [split(doc["context"], doc["choices"][0]) for doc in DOCS]
    prompts = [before + rest for before, rest in pairs]
    asked = {"model": "demo", "prompt": prompts, "temperature": 0, "max_tokens": 1, "seed": 1234}
    answer = httpx2.post(
        f"{url}/v1/completions", json={**asked, "logprobs": 1, "echo": True}, timeout=60
    )
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice, prompt in zip(choices, prompts, strict=True):
        told, (own, likeliest) = choice["logprobs"], scores(prompt)
        # The last one is of the token that was asked for.
        assert len(told["tokens"]) == len(told["top_logprobs"]) == len(prompt) + 1
        assert told["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-4)
        best = [max(top.values()) for top in told["top_logprobs"][1:-1]]
        greedy = [a == b for a, b in zip(told["token_logprobs"][1:-1], best, strict=True)]
        assert greedy == [a == b for a, b in zip(likeliest, prompt[1:], strict=True)]


@pytest.mark.skipif(HARNESS is None, reason="lm_eval is not on the path")
@pytest.mark.parametrize(("size", "concurrent"), [(1, 1), (4, 2)])
def test_a_task_of_the_harness_gets_mlx_lms_log_likelihoods(
    url: str, tmp_path: Path, size: int, concurrent: int
) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tmp_path / "task.yaml").write_text(TASK.format(docs=docs))
    where = f"base_url={url}/v1/completions,tokenizer={resolve(DEMO)}"
    arguments = {
        "--model": "local-completions",
        "--model_args": f"model=demo,{where},num_concurrent={concurrent}",
        "--batch_size": str(size),
        "--include_path": str(tmp_path),
        "--tasks": "omlx_choices",
        "--output_path": str(tmp_path / "out"),
    }
    alone = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [HARNESS, "run", *(part for pair in arguments.items() for part in pair)]
    subprocess.run([*command, "--log_samples"], env={**environment, **alone}, check=True)

    [found] = (tmp_path / "out").rglob("samples_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in found.read_text().splitlines()]
    assert [sample["doc"] for sample in samples] == DOCS
    for sample in samples:
        for choice, [(logprob, greedy)] in zip(
            sample["doc"]["choices"], sample["resps"], strict=True
        ):
            before, rest = split(sample["doc"]["context"], choice)
            own, likeliest = scores(before + rest)
            assert float(logprob) == pytest.approx(sum(own[-len(rest) :]), abs=1e-4)
            assert greedy == str(likeliest[-len(rest) :] == rest)
