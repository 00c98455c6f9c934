"""What to use in place of options and commands that are gone, or that other programs have."""

from __future__ import annotations

_READ_AGAIN = "leave it out (after a restart a shared prefix is read once more)"
_TEMPLATE = "use --template, which asks each row or picture"
_BY_CRON = "let cron run omlx-submit pause ALIAS and omlx-submit resume ALIAS"
_BY_A_PROXY = "set limits of keys in a proxy before the gateway, such as LiteLLM"
_INSTEAD = {
    "omlx-submit": {
        "feed": "leave it out (workers take the rows of batches themselves)",
        "jobs": "see rq info, omlx-submit batches or omlx-submit status",
        "requeue": "rq requeue -S rq.serializers.JSONSerializer --queue omlx:ALIAS:default --all "
        "does it",
        "--chat": "leave it out (a text is a chat where the model has a chat template)",
        "--json-schema": "use --schema",
        "--prompt": _TEMPLATE,
    },
    "omlx-worker": {
        "convert": "use mlx_lm.convert, then run with --mtp-from ORIGINAL",
        **dict.fromkeys(("serve", "server", "start"), "use omlx-worker run -m MODEL"),
        "service": "let systemd or launchd start omlx-worker run, as in examples/service",
        "--acceptance": "leave it out (coupled acceptance is exact, and the only one)",
        "--allow-webhooks": "leave it out (webhooks are not served; examples/after_each_job.py "
        "follows the ends of jobs)",
        **dict.fromkeys(
            ("--calibration", "--no-calibration"), "leave it out (--mode auto measures by itself)"
        ),
        "--draft-model": "use --drafter MODEL,lookup",
        "--duty": _BY_CRON,
        "--hours": _BY_CRON,
        **dict.fromkeys(("--lookup", "--no-lookup"), "use --drafter head,lookup or --drafter head"),
        "--lookup-ring": "leave it out (drafts are looked up in a row's own prompt and text)",
        "--only-on-power": f"{_BY_CRON} by what pmset -g batt says; "
        "caffeinate -i -w PID keeps a Mac awake",
        "--patience": "leave it out (fixed at 30 seconds)",
        "--prompt": _TEMPLATE,
        "--prefix-dir": _READ_AGAIN,
        "--prefix-dir-limit": _READ_AGAIN,
        "--stream-ttl": "leave it out (fixed at a day)",
    },
    "omlx-gateway": {
        **dict.fromkeys(("run", "serve", "start"), "leave it out: omlx-gateway alone serves"),
        "--files-dir": "leave it out (files are in Redis, up to 64 MiB each)",
        "--max-queued": _BY_A_PROXY,
        "--rate": _BY_A_PROXY,
    },
}


def instead(program: str, name: str) -> str:
    """What to use in place of an option or a command of a program; empty if there is nothing."""
    return _INSTEAD.get(program, {}).get(name, "")
