"""The command `pyfast`. Each subcommand is imported when it is run, so that `--help` is quick."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence

USAGE_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return the exit code."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] in ("-V", "--version"):
        from pyfast import __version__

        print(f"pyfast {__version__}")
        return 0
    if arguments[0] in LATER:
        return _later(*arguments)
    command = COMMANDS.get(arguments[0])
    if command is None:
        return fail(
            f"{arguments[0]}: there is no such command. Commands: {', '.join(COMMANDS)}. See pyfast --help.",
            USAGE_ERROR,
        )
    try:
        return command[0](arguments[1:])
    except KeyboardInterrupt:
        return fail("stopped before the work began", INTERRUPTED)


def _open_standard_streams() -> None:
    """Open descriptors 0-2 on the null device where the caller closed them: the next file would take their number, and
    be written to by whatever prints.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
                os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))


def fail(message: str, code: int) -> int:
    """Print one error on stderr; returns the exit code. Long paragraphs are wrapped, tracebacks are left alone."""
    if "\n" not in message:
        message = textwrap.fill(
            f"pyfast: {message}", 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    else:
        message = f"pyfast: {message}"
    print(message, file=sys.stderr)
    return code


def train(arguments: list[str]) -> int:
    """`pyfast train`."""
    from pyfast.train.arguments import parse
    from pyfast.train.errors import TrainingError
    from pyfast.train.joined import first_on_host

    try:
        config = parse(arguments)
    except TrainingError as error:
        return fail(str(error), error.exit_code) if first_on_host() else error.exit_code
    try:
        from pyfast.train.launcher import launch

        return launch(config, shlex.join(["pyfast", "train", *arguments]))
    except TrainingError as error:
        return fail(str(error), error.exit_code) if first_on_host() or not error.alike else error.exit_code


def prepare(arguments: list[str]) -> int:
    """`pyfast prepare`."""
    from pyfast.train.prepare import main as prepare_main

    return prepare_main(arguments)


def doctor(arguments: list[str]) -> int:
    """`pyfast doctor`."""
    from pyfast.doctor import main as doctor_main

    return doctor_main(arguments)


def convert(arguments: list[str]) -> int:
    """`pyfast convert`."""
    from pyfast.convert import main as convert_main

    return convert_main(arguments)


def _later(name: str, *arguments: str) -> int:
    """A command that a later version brings: say so, as an error unless it was asked what it is."""
    text, what_to_do = LATER[name]
    if {"-h", "--help"} & set(arguments):
        print(textwrap.fill(f"pyfast {name}: {text}. Not supported yet. {what_to_do}", 110, break_on_hyphens=False))
        return 0
    return fail(f"{name} is not supported yet. {what_to_do}", USAGE_ERROR)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train, "train a transformer on one or several processes"),
    "prepare": (prepare, "tokenize text into a file that training maps into memory"),
    "convert": (convert, "checkpoint to Hugging Face model and back"),
    "doctor": (doctor, "say what works on this machine, what is missing and what to do about it"),
}
LATER: dict[str, tuple[str, str]] = {
    "verify": (
        "check that a layout computes what one process computes",
        "To compare layouts now, train twice with --optimizer.name sgd and compare metrics.jsonl.",
    ),
    "plan": (
        "search the layout for a model and a machine",
        "To try a layout now: pyfast train --train.steps 3.",
    ),
    "bench": (
        "run the benchmarks",
        "The benchmarks are a pytest suite of the source tree: pip install '.[bench]', then pytest bench, or python "
        "bench/train_step.py.",
    ),
}


def _help() -> str:
    width = max(len(name) for name in [*COMMANDS, *LATER])
    lines = [
        "usage: pyfast COMMAND [arguments]",
        "",
        "Train large transformers in parallel, on CPUs and GPUs.",
        "",
        "Commands:",
    ]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "Not supported yet:"]
    lines += [f"  {name:<{width}}  {text}" for name, (text, _) in LATER.items()]
    lines += [
        "",
        "pyfast COMMAND --help says more about one; pyfast --version prints the version.",
        "",
        "Start with: pyfast train",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
