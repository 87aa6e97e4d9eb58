"""Cases of course data whose servers refuse, fall silent or are gone."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import workloads
from data_servers import HELD_S, DataServer, serving

from dataloading.course_archives import COURSE_DATA
from dataloading.course_datasets import load_course_dataset


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No process, thread or global state is left over."""
    yield from workloads.leaves_nothing()


@pytest.fixture
def server(tidy: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataServer]:
    yield from serving(monkeypatch)


def test_a_19_1_the_second_mirror_takes_over_from_one_that_refuses(
    server: DataServer, tmp_path: Path
) -> None:
    mirrors = [server.mirror("refused"), server.mirror("good")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = load_course_dataset("cifar10", tmp_path, mirrors=mirrors)
    assert not dataset.is_generated
    assert dataset.source == server.mirror("good")
    assert len(dataset) == 10
    assert server.kinds() == ["refused", "good"]


def test_a_19_1_without_any_mirror_data_are_generated(server: DataServer, tmp_path: Path) -> None:
    mirrors = [server.mirror("refused"), server.mirror("missing")]
    with pytest.warns(UserWarning, match=r"GENERATED images take the place of cifar10") as noted:
        dataset = load_course_dataset("cifar10", tmp_path, mirrors=mirrors, images=50)
    assert len(noted) == 1
    assert dataset.is_generated
    assert dataset.source == "generated"
    assert len(dataset) == 50
    assert dataset[0][0].size == (32, 32)


@pytest.mark.parametrize("kind", ["silent", "trickling", "empty_then_silent"])
def test_a_19_2_a_server_that_never_answers_is_given_up(
    server: DataServer, tmp_path: Path, kind: str
) -> None:
    default = inspect.signature(load_course_dataset).parameters["timeout_s"].default
    assert default <= 30
    mirrors = [server.mirror(kind)]
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"time-out: nothing came for 0\.5 s"):
        dataset = load_course_dataset("cifar10", tmp_path, mirrors=mirrors, timeout_s=0.5)
    assert time.monotonic() - began < HELD_S / 4
    assert dataset.is_generated
    assert server.kinds() == [kind]


def test_a_19_2_the_time_is_shared_out_to_the_mirrors(server: DataServer, tmp_path: Path) -> None:
    port = server.server_port
    mirrors = [f"http://{host}:{port}/silent/" for host in ("127.0.0.1", "localhost")]
    with pytest.raises(ConnectionError) as failed:
        load_course_dataset("cifar10", tmp_path, mirrors=mirrors, timeout_s=1.0, generated=False)
    assert str(failed.value).count("time-out: nothing came for 0.5 s") == 2
    assert all(20 / len(known.mirrors) >= 5 for known in COURSE_DATA.values())


def test_a_19_6_three_failures_are_one_message_with_three_lines(
    server: DataServer, tmp_path: Path
) -> None:
    other = server.mirror("missing").replace("127.0.0.1", "localhost")
    mirrors = [server.mirror("missing"), other, server.mirror("silent")]
    with pytest.warns(UserWarning, match="could not be downloaded") as noted:
        load_course_dataset("fashion_mnist", tmp_path, mirrors=mirrors, timeout_s=1.5, images=10)
    assert len(noted) == 1
    lines = [line for line in str(noted[0].message).splitlines() if line.startswith("- ")]
    assert lines == [
        f"- {mirrors[0]}: HTTP 404 Not Found",
        f"- {mirrors[1]}: HTTP 404 Not Found",
        f"- {mirrors[2]}: time-out: nothing came for 0.5 s",
    ]
