import struct
from pathlib import Path

import pytest

from astraflow.metrics import TensorBoardSink
from astraflow.types import MetricItem

pytest.importorskip("tensorboard")


def test_scalars_reach_an_event_file_a_policy(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, clock=lambda: 5.0)
    sink.write("actor", 3, [MetricItem("reward", 0.5)])
    sink.write("critic", 4, [MetricItem("loss", 2.0)])
    sink.close()
    for policy, tag, value in (("actor", b"reward", 0.5), ("critic", b"loss", 2.0)):
        (path,) = (tmp_path / policy).iterdir()
        content = path.read_bytes()
        assert tag in content
        assert struct.pack("<f", value) in content
