"""bench/device.py: what of it runs without a GPU. Its checks, on CPU kernels, are right and can fail."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def device(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import device

    yield device
    for name in [name for name in sys.modules if name == "device" or name.startswith("device_")]:
        del sys.modules[name]


def test_without_a_gpu_it_says_so(device, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_an_unknown_section_is_refused(device, capsys):
    with pytest.raises(SystemExit):
        device.parse(["--section", "everything"])
    assert "attention" in capsys.readouterr().err
    assert device.parse(["--section", "attention", "--checks-only"]).section == ["attention"]


def test_the_checks_of_attention_pass_on_the_cpu(device, capsys):
    import device_attention

    assert device.report_checks(
        "attention", device_attention.check(torch.device("cpu"), length=90, dtypes=(torch.float32, torch.bfloat16))
    )
    printed = capsys.readouterr().out
    for feature in ("softcap, float32", "sinks, bfloat16", "zigzag, float32", "| error |"):
        assert feature in printed


def test_a_wrong_result_is_not_timed(device, monkeypatch, capsys):
    import device_attention

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "describe_device", lambda: "a GPU")
    wrong = [device.Check("causal", 0.5, 1e-5), device.Check("full", float("nan"), 1e-5)]
    monkeypatch.setattr(device_attention, "check", lambda device: iter(wrong))
    monkeypatch.setattr(device_attention, "measure", lambda *_: pytest.fail("timed"))
    assert device.main(["--section", "attention"]) == 1
    streams = capsys.readouterr()
    assert "**causal**" in streams.out and "**full**" in streams.out and "nothing was timed" in streams.err


def test_a_kernel_that_cannot_run_is_a_failed_check_and_the_rest_is_checked(device, capsys):
    def explode():
        raise RuntimeError("out of resource")

    def checks():
        yield from device.guarded("first", explode)
        yield from device.guarded("second", lambda: [device.Check("second", 0.0, 1e-5)])

    assert not device.report_checks("some", checks())
    streams = capsys.readouterr()
    assert "**first: RuntimeError**" in streams.out and "| second |" in streams.out and "out of resource" in streams.err


def test_checks_stop_when_their_time_is_over(device, capsys):
    checks = (device.Check(name, 0.0, 1e-5) for name in ("first", "second"))
    assert device.report_checks("some", checks, deadline=-math.inf)
    printed = capsys.readouterr().out
    assert "first" in printed and "second" not in printed and "out of time" in printed


def test_the_checks_of_moe_pass_on_the_cpu_and_its_tables_are_printed(device, capsys):
    import device_moe

    size = device_moe.Size(33, 2, 5, 15, 31)
    checks = device_moe.check(torch.device("cpu"), (size,), (torch.float32, torch.bfloat16))
    assert device.report_checks("moe", checks)
    lines = list(device_moe.measure(torch.device("cpu"), math.inf, device_moe.Size(64, 2, 4, 32, 16)))
    assert sum(line.startswith("| forward") for line in lines) == 2
    assert sum("unpermute" in line for line in lines) == 2
