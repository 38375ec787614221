"""`make gpu` as far as it goes without a GPU."""

from __future__ import annotations

from tests.device.session import Device


def found(section: str) -> list[tuple[str, bool | None]]:
    from benchmarks import gpu  # on the device

    return [(line.name, line.ok) for line in gpu.SECTIONS[section]()]


def test_sections_run(device: Device) -> None:
    """Those that need hardware say so. Not here: `verify`, which has tests of its own
    (test_processes.py), and `races`, whose bits only a GPU could change."""
    assert device.run(found, "waits") == [
        ("transformers, a plain loop", None),
        ("one process", True),
        ("one process, 4 micro-batches", True),
    ]
    for section in ("checks", "memory", "speed"):
        assert [ok for _, ok in device.run(found, section)] == [None]
