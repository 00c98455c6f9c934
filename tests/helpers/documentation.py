"""The commands that the documentation prints."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    name: ROOT / name
    for name in (
        *("README.md", "docs/usage.md", "docs/bulk.md"),
        *("docs/http.md", "docs/operations.md", "docs/fleet.md", "docs/tutorial.md", "docs/mac.md"),
    )
}

DOWNLOAD = "downloads a model"
HERE = "the test is in the clone, in a folder with the files of examples/data"
INSTALLS = "would install a service; test_service does, where it can"
ON_A_MAC = "is for a Mac of the reader's"
OTHER_SHELL = "is for another shell than bash"
NOT_TYPED = {
    "git clone https://github.com/omlx-queue/omlx-queue": HERE,
    "cd omlx-queue": HERE,
    ". .venv/bin/activate": HERE,
    "cd examples/data": HERE,
    "./scripts/quickstart": "installs; tests of the demo run the rest",
    "omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit --mtp-from Qwen/Qwen3.5-9B "
    "--embedded-redis": DOWNLOAD,
    "omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit --mtp-from Qwen/Qwen3.5-9B "
    "--model-alias qwen --redis-url redis://my-server:6379/0": DOWNLOAD,
    "omlx-worker check -m mlx-community/Qwen3.5-9B-MLX-4bit": DOWNLOAD,
    "omlx-worker convert Qwen/Qwen3.5-9B -o Qwen3.5-9B-4bit --bits 4": DOWNLOAD,
    "omlx-worker run -m Qwen3.5-9B-4bit": DOWNLOAD,
    "omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit --fixed-shapes --max-batch 8": DOWNLOAD,
    "lm_eval run --model local-completions --tasks NAME --batch_size 8 --model_args "
    "model=demo,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=FOLDER,num_concurrent=8": (
        "is not installed; test_lm_eval runs it where it is"
    ),
    'eval "$(_OMLX_SUBMIT_COMPLETE=zsh_source omlx-submit)"': OTHER_SHELL,
    'eval "$(_OMLX_WORKER_COMPLETE=zsh_source omlx-worker)"': OTHER_SHELL,
    "_OMLX_SUBMIT_COMPLETE=fish_source omlx-submit | source": OTHER_SHELL,
    'omlx-submit --tools tools.json "How warm is it in Paris?"': "the toy has no chat template",
    "brew install redis": ON_A_MAC,
    "brew services restart redis": ON_A_MAC,
    "redis-cli CONFIG GET dir": ON_A_MAC,
    "redis-cli -h mac-1.local -a change-me --rdb omlx-queue.rdb": ON_A_MAC,
    "caffeinate -s": ON_A_MAC,
    "caffeinate -s omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit "
    "--model-alias qwen": DOWNLOAD,
    "git pull && ./scripts/setup": HERE,
    "pip install 'omlx-queue[gateway]'": "installs",
    "omlx-gateway --api-keys api-keys.jsonl --host 0.0.0.0": "serves other machines",
    "rq-dashboard --json": "is not installed; docker-compose.yml runs it",
    "omlx-worker service install -m demo --embedded-redis": INSTALLS,
    "omlx-worker service status": INSTALLS,
    "omlx-worker service logs -f": INSTALLS,
    "omlx-worker service uninstall": INSTALLS,
    "scripts/setup worker && .venv/bin/omlx-worker bench --share mac.json": ON_A_MAC,
    "omlx-submit pause qwen": "names a model of the reader's; test_operate pauses one",
    "omlx-submit drain mac-1": "names a worker of the reader's; test_operate drains one",
    "omlx-submit jobs --state failed -m qwen --limit 0 --json | jq -r .id "
    "| xargs omlx-submit requeue": "no job has failed here, and xargs would name none",
}
"""Commands that the test does not type, and why."""

ENDLESS = {
    "omlx-gateway --port 8000",
    "omlx-gateway --port 8000 --redis-url redis://127.0.0.1:6379/0",
    "omlx-worker run -m demo --embedded-redis",
    "omlx-worker run -m demo --embedded-redis --metrics-port 9400",
    "omlx-submit status --watch",
}
"""Commands that go on until they are interrupted."""

IN_THE_BACKGROUND = {
    # The test's own server takes the place of the embedded one.
    "omlx-worker run -m demo --embedded-redis --name first": "omlx-worker run -m demo --name first",
}
"""Commands that must go on beside the next ones, and what is typed for them."""


def commands_of(page: Path) -> list[str]:
    """The commands of a page in order: of indented blocks, those after ``$`` if any has one."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = []
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        prompted = [line.removeprefix("    $ ") for line in lines if line.startswith("    $ ")]
        found += prompted or [line.removeprefix("    ") for line in lines]
    return [re.sub(r"\s+# .*", "", command).strip() for command in found]
