"""The commands that the documentation prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from shutil import which
from textwrap import indent

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
EMBEDS = "needs a model of embeddings; test_embed and test_embeddings have one"
READS = "test_reader and the quickstart run it, in the root of the clone"
SEES = "needs a model that takes pictures; test_pictures has the same inputs"
ON_A_MAC = "is for a Mac of the reader's"
OTHER_SHELL = "is for another shell than bash"
NOT_TYPED = {
    "git clone https://github.com/omlx-queue/omlx-queue": HERE,
    "cd omlx-queue": HERE,
    ". .venv/bin/activate": HERE,
    "cd examples/data": HERE,
    "./scripts/quickstart": "installs; tests of the demo run the rest",
    "omlx-worker batch -m mlx-community/Qwen3.5-9B-MLX-4bit --mtp-from Qwen/Qwen3.5-9B "
    'examples/data/mails.csv -o orders.csv --template "Who orders what? {mail}" '
    '--schema "customer, item, count int"': DOWNLOAD,
    "omlx-worker batch -m mlx-community/Qwen3-VL-4B-Instruct-4bit scans/ -o pages.csv "
    '--template "Read the bill." --schema "sender, date, total number"': DOWNLOAD,
    ".venv/bin/omlx-worker batch -m mlx-community/Qwen3-VL-4B-Instruct-4bit FOLDER --dry-run 16 "
    '--template "What is on it?" > pictures.json': DOWNLOAD,
    "omlx-worker batch -m examples/reader examples/data/receipts -o receipts.csv "
    "--template Read.": READS,
    'omlx-submit run scans/ -o pages.csv --template "Who sent it, and when?" '
    '--schema "sender, date"': SEES,
    "omlx-submit run items.csv -o looks.csv --image photo "
    '--template "Is it a {kind}?" --keep': SEES,
    "omlx-submit run photos.parquet -o captions.csv --image image "
    '--template "Describe it." --each captions': SEES,
    'omlx-submit run scan.pdf -o text.csv --template "Write down all text." '
    "--max-completion-tokens 4000": SEES,
    "omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit --embedded-redis": DOWNLOAD,
    "omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit --mtp-from Qwen/Qwen3.5-9B "
    "--model-alias qwen --redis-url redis://my-server:6379/0": DOWNLOAD,
    "omlx-worker run --redis-url redis://my-server:6379/0 --max-batch 16 "
    "-m mlx-community/Qwen3.5-9B-MLX-4bit --model-alias qwen --mtp-from Qwen/Qwen3.5-9B "
    "-m mlx-community/gemma-3-12b-it-4bit --model-alias gemma --mtp-depth 0": DOWNLOAD,
    "omlx-worker check -m mlx-community/Qwen3.5-9B-MLX-4bit": DOWNLOAD,
    "mlx_lm.convert --hf-path Qwen/Qwen3.5-9B --mlx-path Qwen3.5-9B-4bit --quantize --q-bits 4": (
        DOWNLOAD
    ),
    "omlx-worker run -m Qwen3.5-9B-4bit --mtp-from Qwen/Qwen3.5-9B": DOWNLOAD,
    "omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit --vision-from Qwen/Qwen3.5-9B": DOWNLOAD,
    "omlx-worker run -m mlx-community/Qwen3.5-9B-MLX-4bit --fixed-shapes --max-batch 8": DOWNLOAD,
    "omlx-worker run -m Qwen/Qwen3-Embedding-0.6B --embedded-redis": DOWNLOAD,
    'omlx-submit embed releases-500.csv -o vectors.parquet --template "{call}" --keep': EMBEDS,
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
    "git pull && ./scripts/setup worker": HERE,
    "pip install 'omlx-queue[gateway]'": "installs",
    "omlx-gateway --api-keys api-keys.jsonl --host 0.0.0.0": "serves other machines",
    "llm install omlx-queue": "installs",
    "rq-dashboard --json": "is not installed; docker-compose.yml runs it",
    "scripts/setup worker && .venv/bin/omlx-worker bench -m demo --share mac.json": ON_A_MAC,
    "omlx-submit pause qwen": "names a model of the reader's; test_operate pauses one",
    "omlx-submit drain mac-1": "names a worker of the reader's; test_operate drains one",
}
"""Commands that the test does not type, and why."""

OPTIONAL = ("llm",)
"""Programs whose commands are typed where they are beside this Python."""

PRINTED_URL, PRINTED_REDIS = "http://127.0.0.1:8000", "redis://127.0.0.1:6379/0"

ENDLESS = {
    "omlx-gateway --port 8000",
    "omlx-worker run -m demo --embedded-redis",
    "omlx-worker run -m demo --embedded-redis --metrics-port 9400",
    "omlx-submit status --watch",
}
"""Commands that go on until they are interrupted."""

_GATEWAY = f"omlx-gateway --port 8000 --redis-url {PRINTED_REDIS}"
IN_THE_BACKGROUND = {
    # The test's own server takes the place of the embedded one.
    "omlx-worker run -m demo --embedded-redis --name first": (
        "omlx-worker run -m demo --name first 2>> background.log &"
    ),
    _GATEWAY: f"{_GATEWAY} 2>> background.log & "
    f"curl --silent --retry 60 --retry-delay 1 --retry-connrefused {PRINTED_URL}/health",
}
"""Commands that must go on beside the next ones, and what is typed for them."""

_PRODUCER = "from omlx_producer import Producer\nproducer = Producer()\n"
_JOB = f"{_PRODUCER}job = producer.submit(prompt='def f(x):', max_completion_tokens=9)\n"
FRAGMENTS = {
    "job = producer.submit(": (
        f"import json\n{_PRODUCER}schema = json.load(open('person.json'))\n"
    ),
    "from omlx_producer import ChatChunks": _JOB,
    'Job.fetch(id, connection=connection, serializer="json").return_value()': (
        f"{_JOB}from rq.job import Job\n"
        "assert job.result().text\n"
        "id, connection = job.id, producer.connection\n"
    ),
    "with tqdm(total=len(prompts)) as bar:": (
        f"{_PRODUCER}from tqdm import tqdm\nprompts = ['def f(x):'] * 3\n"
    ),
    "batch = producer.batch(prompts)": f"{_PRODUCER}prompts = ['def f(x):'] * 3\n",
}
"""The first lines, without comments, of Python blocks that are no whole programs, and what is run
before them."""

NOT_RUN = {
    "message = producer.submit(messages=messages, tools=tools).result().choices[0].message": (
        "is a part of examples/call_tools.py"
    ),
    "import base64": "needs a model that takes pictures; test_completions has one",
    'cat, dog, car = producer.embed(["a cat", "a dog", "a car"])': EMBEDS,
    'answer = client.embeddings.create(model="qwen3-embedding", input=["a cat", "a dog"])': EMBEDS,
    'answered = producer.run(frame, template="Summarise: {text}").frame()': (
        "needs a frame of pandas or polars; test_library has some"
    ),
}
"""The first lines of Python blocks that the test does not run, and why."""


def blocks_of(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in some language."""
    fenced = rf"^```{language}\n(.*?)^```$"
    return re.findall(fenced, page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    """The commands of a page in order: of a block, those after ``$`` if any has one.

    Blocks are indented, or fenced as ``bash``.
    """

    def indented(block: re.Match[str]) -> str:
        return indent(block[2], " " * 4) if block[1] == "bash" else ""

    fenced = r"^```(\w*)\n(.*?)^```$"
    text = re.sub(fenced, indented, page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = []
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        prompted = [line.removeprefix("    $ ") for line in lines if line.startswith("    $ ")]
        found += prompted or [line.removeprefix("    ") for line in lines]
    return [re.sub(r"\s+# .*", "", command).strip() for command in found]


def is_typed(command: str) -> bool:
    """Whether the test types a command here."""
    program = command.split()[0]
    beside = which(program, path=Path(sys.executable).parent)
    return command not in NOT_TYPED and (program not in OPTIONAL or beside is not None)


def first_line(block: str) -> str:
    """The first line of a block, without its comment."""
    return block.splitlines()[0].partition("  #")[0]
