"""The command `pyfast`. Each subcommand is imported when it is run, so that `--help` is quick."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] in ("-V", "--version"):
        from pyfast import __version__

        print(f"pyfast {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        return fail(f"{arguments[0]}: there is no such command. Commands: {', '.join(COMMANDS)}. See pyfast --help.",
                    USAGE_ERROR)
    return command[0](arguments[1:])


def fail(message: str, code: int) -> int:
    """Print one error on stderr; returns the exit code. Long paragraphs are wrapped, tracebacks are left alone."""
    if "\n" not in message:
        message = textwrap.fill(f"pyfast: {message}", 110, subsequent_indent="  ", break_long_words=False,
                                break_on_hyphens=False)
    else:
        message = f"pyfast: {message}"
    print(message, file=sys.stderr)
    return code


def train(arguments: list[str]) -> int:
    """`pyfast train`."""
    from pyfast.train.arguments import parse
    from pyfast.train.errors import TrainingError

    try:
        config = parse(arguments)
        from pyfast.train.launcher import launch

        return launch(config, shlex.join(["pyfast", "train", *arguments]))
    except TrainingError as error:
        return fail(str(error), error.exit_code)


def prepare(arguments: list[str]) -> int:
    """`pyfast prepare`."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="pyfast prepare", description="Tokenize text into a file that training maps into memory (data.paths).")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text files, directories and .jsonl files")
    parser.add_argument("--output", required=True, metavar="FILE", help="the token file to write")
    parser.add_argument("--tokenizer", default="byte", help="byte, or the path of a tokenizer.json (default: byte)")
    parser.add_argument("--processes", type=int, help="processes to use (default: all cores)")
    parser.add_argument("--mask_prompt", action="store_true", help="no loss on the prompts of .jsonl lines")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    options = vars(parser.parse_args(arguments))
    from pyfast.train.prepare import prepare as run

    try:
        summary = run(options.pop("paths"), options.pop("output"), **options)
    except (ValueError, OSError, ImportError) as error:
        return fail(str(error), 1)
    print(f"Next:\n  pyfast train --data.paths {shlex.quote(str(summary.output))} --data.tokenizer {options['tokenizer']}")
    return 0


def doctor(arguments: list[str]) -> int:
    """`pyfast doctor`."""
    from pyfast.doctor import main as doctor_main

    return doctor_main(arguments)


def convert(arguments: list[str]) -> int:
    """`pyfast convert`."""
    from pyfast.convert import main as convert_main

    return convert_main(arguments)


def _later(name: str, what_to_do: str) -> Callable[[list[str]], int]:
    return lambda arguments: fail(f"{name} is not supported yet. {what_to_do}", USAGE_ERROR)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train, "train a transformer on one or several processes"),
    "prepare": (prepare, "tokenize text into a file that training maps into memory"),
    "convert": (convert, "checkpoint to Hugging Face model and back"),
    "doctor": (doctor, "say what works on this machine, what is missing and what to do about it"),
    "verify": (_later("verify", "To compare layouts now, train twice with --optimizer.name sgd and compare metrics.jsonl."),
               "check that a layout computes what one process computes (not supported yet)"),
    "plan": (_later("plan", "To try a layout now: pyfast train --train.steps 3."),
             "search the layout for a model and a machine (not supported yet)"),
    "bench": (_later("bench", "The benchmarks are a pytest suite of the source tree: pip install '.[bench]', then "
                              "pytest bench, or python bench/train_step.py."),
              "run the benchmarks (not supported yet)"),
}


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = ["usage: pyfast COMMAND [arguments]", "",
             "Train large transformers in parallel, on CPUs and GPUs.", "", "Commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "pyfast COMMAND --help says more about one; pyfast --version prints the version.", "",
              "Start with: pyfast train"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
