from __future__ import annotations

from pathlib import Path

import pytest

from pd_grpc.bench.trace import Arrival, NoTrace, compact, read_trace
from pd_grpc.bench.workload import Length

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:17:46.6805900,879,0
"""


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    return path


def test_a_trace_counts_from_its_first_request(azure: Path) -> None:
    first, second, _ = read_trace(azure, minutes=10)
    assert first == Arrival(0.0, Length(374, 44))
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert second.length == Length(396, 109)


def test_a_trace_is_cut_after_its_first_minutes(azure: Path) -> None:
    assert len(read_trace(azure, minutes=2)) == 2
    assert len(read_trace(azure, minutes=2.01)) == 3


def test_an_answer_of_no_tokens_counts_as_one(azure: Path) -> None:
    assert read_trace(azure, minutes=10)[-1].length == Length(879, 1)


def test_the_excerpt_that_comes_with_the_package_is_ten_minutes() -> None:
    arrivals = read_trace(None, minutes=10)
    assert len(arrivals) == 2867
    assert arrivals[0] == Arrival(0.0, Length(374, 44))
    assert 590 < arrivals[-1].at_s < 600
    assert read_trace(None, minutes=60) == arrivals


def test_what_is_written_compactly_reads_the_same(azure: Path, tmp_path: Path) -> None:
    arrivals = read_trace(azure, minutes=10)
    (tmp_path / "compact.csv").write_text(compact(arrivals))
    again = read_trace(tmp_path / "compact.csv", minutes=10)
    assert [each.length for each in again] == [each.length for each in arrivals]
    assert [each.at_s for each in again] == pytest.approx([a.at_s for a in arrivals], abs=1e-3)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoTrace, match=r"absent\.csv: No such file"):
        read_trace(tmp_path / "absent.csv", minutes=10)


def test_a_file_of_other_columns_is_refused_with_what_was_wanted(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(NoTrace, match="has the columns a, b; wanted TIMESTAMP, ContextTokens"):
        read_trace(path, minutes=10)


def test_a_request_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(AZURE + "2023-11-16 18:17:47.0,many,3\n")
    with pytest.raises(NoTrace, match="request 4 cannot be read"):
        read_trace(path, minutes=10)


@pytest.mark.parametrize(
    ("content", "says"), [(AZURE.splitlines()[0].encode(), "no request"), (b"\xff\xfe", "UTF-8")]
)
def test_a_file_in_which_there_is_no_request_is_refused(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "empty.csv"
    path.write_bytes(content)
    with pytest.raises(NoTrace, match=says):
        read_trace(path, minutes=10)
