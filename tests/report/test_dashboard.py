from __future__ import annotations

import functools
import http.client
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headtohead import Study, UserError, watch_study
from headtohead.study.store.run_store import RunDirectory
from tests.processes import PATIENCE, until

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from headtohead.report.dashboard.server import Watch, server
from headtohead.report.dashboard.status import StatusReader, StudyStatus

HOSTILE = "<script>alert(1)<script>"


@pytest.fixture(scope="module")
def folder(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study with a hostile name."""
    out = tmp_path_factory.mktemp("watch") / "out"
    arms = ["standard", {"arm": "sharing:tie=kv", "name": HOSTILE}]
    Study(arms, name=HOSTILE, corpus=f"file:{story}", tokens=2560, batch=256, seeds=2).run(
        out, workers=1, quiet=True
    )
    return out


@pytest.fixture
def unfinished(folder: Path, tmp_path: Path) -> Path:
    """The study with one run stopped halfway and one not started."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    half, fresh = sorted((copy / "runs").iterdir())[:2]
    (half / "result.json").unlink()
    rows = (half / "metrics.jsonl").read_text().splitlines()
    (half / "metrics.jsonl").write_text("\n".join(rows[: len(rows) // 2]) + "\n")
    shutil.rmtree(fresh)
    return copy


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ThreadingHTTPServer]:
    with server(folder, 0) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def ask(
    served: ThreadingHTTPServer, route: str, method: str = "GET", host: str = ""
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=60)
    connection.putrequest(method, route, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{served.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_a_finished_study_shows_verdicts(folder: Path) -> None:
    facts = StatusReader(folder).look().facts
    assert facts["counts"] == {"done": 4, "running": 0, "waiting": 0, "all": 4}
    assert facts["share"] == 1
    assert facts["left"] == "finished"
    assert facts["active"] == []
    assert len(facts["sentences"]) == 1


def test_an_unfinished_study_shows_progress_and_no_verdict(unfinished: Path) -> None:
    status = StatusReader(unfinished).look()
    assert status.facts["counts"] == {"done": 2, "running": 0, "waiting": 2, "all": 4}
    assert status.facts["share"] == pytest.approx(2.5 / 4)
    assert status.facts["sentences"] == []
    assert status.facts["left"] == "no run is active"
    (row,) = status.facts["active"]
    assert (row["state"], row["words"]) == ("stopped", "step 5 of 10")
    assert list(status.curves[0]) == ["tokens", "flops", "seconds"]


def test_the_time_left_follows_from_the_speed_of_active_runs(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "state", lambda run, result=None: "done" if result else "running")
    half = next(path for path in (unfinished / "runs").iterdir() if not (path / "result.json").exists())
    lines = [json.loads(line) for line in (half / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["seconds"] = 100.0
    (half / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    facts = StatusReader(unfinished).look().facts
    # 1,280 tokens in 100 s; 1,280 of this run and 2,560 of the run not started are left.
    assert facts["left"] == "about 5 m 00 s of training left"
    assert any(row["words"].endswith("about 1 m 40 s left") for row in facts["active"])


def test_a_run_stopped_during_evaluation_is_not_evaluated(unfinished: Path, folder: Path) -> None:
    half = next(path for path in (unfinished / "runs").iterdir() if not (path / "result.json").exists())
    shutil.copy(folder / "runs" / half.name / "metrics.jsonl", half)
    (row,) = StatusReader(unfinished).look().facts["active"]
    assert (row["state"], row["words"]) == ("stopped", "trained, not evaluated")


def test_a_removed_result_is_noticed(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    follower = StatusReader(copy)
    assert follower.look().facts["counts"]["done"] == 4
    next(copy.glob("runs/*/result.json")).unlink()
    assert follower.look().facts["counts"]["done"] == 3


def test_page_state_and_curves_are_served_under_a_strict_policy(served: ThreadingHTTPServer) -> None:
    for route, kind in (
        ("/", "text/html"),
        ("/watch.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/state.json", "application/json"),
        ("/curves/0/tokens/light.svg?abc", "image/svg+xml"),
        ("/curves/0/seconds/dark.svg", "image/svg+xml"),
    ):
        status, headers, content = ask(served, route)
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, kind)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert content
        if kind in ("text/html", "image/svg+xml"):
            assert b"<script>" not in content
    assert json.loads(ask(served, "/state.json")[2])["name"] == HOSTILE


@pytest.mark.parametrize(
    "route",
    [
        "/study.json",
        "/../study.json",
        "/runs/",
        "//etc/passwd",
        "/curves/0/tokens/../light.svg",
        "/curves/9/tokens/light.svg",
        "/curves/-1/tokens/light.svg",
        "/page.css/",
        "/%2e%2e/study.json",
        "http://127.0.0.1/etc/passwd",
    ],
)
def test_only_listed_routes_exist(served: ThreadingHTTPServer, route: str) -> None:
    assert ask(served, route)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_is_answered(served: ThreadingHTTPServer, method: str) -> None:
    assert ask(served, "/", method)[0] == 501


def test_other_host_names_are_rejected(served: ThreadingHTTPServer) -> None:
    status, _, content = ask(served, "/state.json", host="attacker.example")
    assert status == 403
    assert b"alert" not in content
    assert ask(served, "/", host=f"localhost:{served.server_port}")[0] == 200


def test_it_listens_on_localhost_only(served: ThreadingHTTPServer) -> None:
    assert served.server_address[0] == "127.0.0.1"


@pytest.fixture
def other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A server whose handled requests are counted in `requests_done`."""
    with server(folder, 0) as running:
        close, done = running.shutdown_request, []

        def counted(request: Any) -> None:
            close(request)
            done.append(request)

        monkeypatch.setattr(running, "shutdown_request", counted)
        running.requests_done = done  # type: ignore[attr-defined]
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def connect(served: ThreadingHTTPServer, content: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", served.server_port), timeout=60)
    client.sendall(content.format(port=served.server_port).encode())
    return client


REQUEST = "GET /state.json HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n"


@pytest.mark.parametrize("request_", [REQUEST, "GET /st", "POST / HTTP/1.1\r\n\r\n", "\x00\x16\x03\r\n", ""])
def test_a_client_that_leaves_early_is_not_reported(
    other: Any, request_: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = threading.Event()

    def slow(watch: Watch, route: str) -> tuple[str, bytes]:
        gone.wait(PATIENCE)
        return "text/plain", bytes(2**24)

    monkeypatch.setattr(Watch, "answer", slow)
    client = connect(other, request_)
    # Resets the connection instead of closing it, so that the answer fails.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    gone.set()
    until(lambda: other.requests_done)
    assert capsys.readouterr() == ("", "")


def test_slow_clients_do_not_delay_others(
    other: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Watch.answer
    large = ("text/plain", bytes(2**24))
    monkeypatch.setattr(
        Watch, "answer", lambda watch, route: large if route == "/large" else answer(watch, route)
    )
    slow = [connect(other, "GET /st") for _ in range(4)]
    slow += [connect(other, REQUEST.replace("/state.json", "/large")) for _ in range(4)]
    for route in ("/", "/state.json", "/curves/0/tokens/light.svg"):
        assert ask(other, route)[0] == 200
    for client in slow:
        client.close()


def test_a_study_that_cannot_be_read_in_time_blocks_no_request(
    other: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, released = StatusReader.look, threading.Event()

    def stuck(reader: StatusReader) -> StudyStatus:
        released.wait(PATIENCE)
        return look(reader)

    monkeypatch.setattr(StatusReader, "look", stuck)
    monkeypatch.setattr("headtohead.report.dashboard.server._PATIENCE", 0.01)
    for _ in range(2):
        status, _, content = ask(other, "/state.json")
        assert status == 200
        assert "the study cannot be read" in json.loads(content)["trouble"]
        assert ask(other, "/")[0] == 200
        assert ask(other, "/curves/0/tokens/light.svg")[0] == 404
    released.set()
    until(lambda: json.loads(ask(other, "/state.json")[2]).get("name") == HOSTILE)


def test_an_error_while_reading_the_study_is_shown(
    other: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(reader: StatusReader) -> StudyStatus:
        raise ValueError("a number\nof a kind")

    monkeypatch.setattr(StatusReader, "look", fail)
    assert json.loads(ask(other, "/state.json")[2])["trouble"] == "a number"
    monkeypatch.setattr(Watch, "_current", fail)
    assert ask(other, "/state.json")[::2] == (500, b"a number")
    assert capsys.readouterr() == ("", "")


def test_mistakes_are_one_clear_line(folder: Path, served: ThreadingHTTPServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"port {served.server_port} is already in use"):
        watch_study(folder, port=served.server_port, quiet=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; a study is a directory"):
        watch_study(tmp_path / "file")
    with pytest.raises(UserError, match="out of range"):
        watch_study(folder, port=70000)


def test_a_study_that_has_not_begun_is_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headtohead.report.dashboard.server._EVERY", 0.01)
    later = tmp_path / "later"
    with server(later, 0) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        for exists in (False, True):
            if exists:
                later.mkdir()
            state = json.loads(ask(running, "/state.json")[2])
            assert state["waiting"].startswith(f"No study in {later} yet.")
            assert "counts" not in state
            assert ask(running, "/report.html")[0] == 404
        shutil.copytree(folder, later, dirs_exist_ok=True)
        until(lambda: json.loads(ask(running, "/state.json")[2]).get("name") == HOSTILE)
        running.shutdown()


def test_a_finished_study_links_to_its_report(served: ThreadingHTTPServer, folder: Path) -> None:
    state = json.loads(ask(served, "/state.json")[2])
    assert (state["report"], state["headline"][:20]) == (True, "Nobody beat standard")
    assert b'href="/report.html"' in ask(served, "/")[2]
    status, headers, content = ask(served, "/report.html")
    assert (status, content) == (200, (folder / "report.html").read_bytes())
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy, "the report can request nothing"


def test_an_unfinished_study_has_no_report_and_no_headline(unfinished: Path) -> None:
    assert (unfinished / "report.html").is_file(), "of an earlier execution"
    facts = StatusReader(unfinished).look().facts
    assert (facts["report"], facts["headline"]) == (False, "")
    with server(unfinished, 0) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        assert ask(running, "/report.html")[0] == 404
        running.shutdown()


def test_closed_tabs_do_not_end_it_and_ctrl_c_does(folder: Path) -> None:
    command = [sys.executable, "-m", "headtohead", "watch", str(folder), "--port", "0"]
    # The test runner may ignore the signal, and a child would inherit that.
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://127.0.0.1:" in line
    port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
    for route in ("/state.json", "/report.html", "/"):
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        client.sendall(f"GET {route} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/report.html")
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "stopped watching" in out
    assert err == ""
