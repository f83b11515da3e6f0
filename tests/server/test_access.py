"""Who may ask, and what is refused: tokens, names, pages, ids that lead elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import stat
from urllib.parse import urlsplit

import pytest
from servers import fields

from mixgrpo.backend.client import Backend, BackendError, BackendUnreachable
from mixgrpo.backend.server.runs import Run, UnknownFile


def request(server, method, path, headers=None, body=None):
    """One raw request; a header given as None is left out. Returns status, headers, body."""
    address = urlsplit(server.state["address"])
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"Host": address.netloc, "Authorization": f"Bearer {server.state['token']}"} | (headers or {})
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def refusal(answer):
    return answer[0], json.loads(answer[2])["error"]["type"]


@pytest.mark.parametrize(
    "given", [None, "", "Bearer ", "Bearer wrong", "Basic x", "Bearer t\u00f6ken".encode().decode("latin-1")]
)
def test_nothing_is_answered_without_the_token(finished, given):
    server, job = finished
    for path in ("/v1/server", "/v1/jobs", f"/v1/jobs/{job['id']}", f"/v1/jobs/{job['id']}/artifacts", "/nowhere"):
        assert refusal(request(server, "GET", path, {"Authorization": given})) == (401, "BadToken")
    assert refusal(request(server, "POST", "/v1/jobs", {"Authorization": given}, b"{}")) == (401, "BadToken")


def test_a_prefix_of_the_token_or_more_than_it_is_not_the_token(finished):
    server, _ = finished
    token = server.state["token"]
    assert len(token) >= 32
    for wrong in (token[:-1], token + "x", token.swapcase()):
        with pytest.raises(BackendError, match="token") as caught:
            asyncio.run(Backend(server.state["address"], wrong).jobs())
        assert caught.value.kind == "BadToken"
    assert token not in repr(server.backend)


@pytest.mark.parametrize("host", [None, "", "evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", "localhost@evil"])
def test_a_foreign_host_name_is_refused_even_with_the_token(finished, host):
    status, *rest = request(finished[0], "GET", "/v1/server", {"Host": host})
    assert status in ((400, 403) if host is None else (403,)), rest


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9999", "[::1]:5"])
def test_a_tunnel_with_another_port_is_answered(finished, host):
    assert request(finished[0], "GET", "/v1/server", {"Host": host})[0] == 200


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8188", "https://evil.example", "null"])
def test_web_pages_are_refused(finished, origin):
    assert refusal(request(finished[0], "GET", "/v1/jobs", {"Origin": origin})) == (403, "Forbidden")


ELSEWHERE = [
    "..", "../..", "%2e%2e", "..%2f..%2fjobs.sqlite", "0123456789abcde", "0123456789ABCDEF", "0123456789abcdef0",
    "0123456789abcdef%00", "0123456789abcdef%0a", "%2fetc", "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("job_id", ELSEWHERE, ids=range(len(ELSEWHERE)))
@pytest.mark.parametrize("rest", ["", "/events", "/summary", "/artifacts"])
def test_what_is_no_id_finds_no_job(finished, job_id, rest):
    assert request(finished[0], "GET", f"/v1/jobs/{job_id}{rest}")[0] == 404


def test_an_id_that_nobody_has_is_an_unknown_job(finished):
    server, _ = finished
    for question in ("job", "pause", "cancel", "events", "summary", "artifacts"):
        with pytest.raises(BackendError, match="no job") as caught:
            server.ask(question, "0123456789abcdef")
        assert caught.value.kind == "UnknownJob"


@pytest.mark.parametrize(
    "path",
    [
        "lora/..%2f..%2f..%2fserver.json", "lora/../spec.json", "lora/..%2fspec.json", "checkpoints/iteration_000001.safetensors",
        "lora/small_000001.safetensors%00.png", "lora/.lock", "lora/small_1.safetensors", "%2e%2e/spec.json",
        "lora/small_000999.safetensors", "lora//etc/passwd", "lora/%2fetc%2fpasswd", "samples/small_000001.safetensors",
    ],
)  # fmt: skip
def test_no_name_leads_out_of_what_a_run_offers(finished, path):
    server, job = finished
    assert request(server, "GET", f"/v1/jobs/{job['id']}/artifacts/{path}")[0] == 404


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_a_link_in_the_run_folder_leads_nowhere(finished):
    server, job = finished
    link = server.run_folder(job["id"]) / "lora" / "link_000001.safetensors"
    link.symlink_to(server.data / "server.json")
    try:
        assert request(server, "GET", f"/v1/jobs/{job['id']}/artifacts/lora/{link.name}")[0] == 404
    finally:
        link.unlink()


def test_artifacts_arrive_whole_or_in_ranges_with_their_checksum(finished, tmp_path):
    server, job = finished
    artifacts = server.ask("artifacts", job["id"])
    assert {(one["kind"], one["iteration"]) for one in artifacts} >= {
        *(("lora", 1), ("lora", 2), ("samples", 1), ("samples", 2)),
        *(("fixed", 0), ("fixed", 1), ("fixed", 2)),
    }
    for artifact in artifacts:
        file = server.ask("download", job["id"], artifact, tmp_path / artifact["name"])
        original = server.run_folder(job["id"]) / artifact["kind"] / artifact["name"]
        assert file.read_bytes() == original.read_bytes()
        assert hashlib.sha256(file.read_bytes()).hexdigest() == artifact["sha256"] and file.stat().st_size == artifact["size"]
    path = f"/v1/jobs/{job['id']}/artifacts/lora/{artifacts[0]['name']}"
    status, headers, body = request(server, "GET", path, {"Range": "bytes=100-199"})
    assert (status, body) == (206, (tmp_path / artifacts[0]["name"]).read_bytes()[100:200])
    assert headers["X-Checksum-SHA256"] == artifacts[0]["sha256"]


def test_a_sheet_that_is_removed_while_somebody_asks_for_it_is_an_unknown_file(finished, tmp_path, monkeypatch):
    server, job = finished
    folder = server.run_folder(job["id"]) / "samples"
    (folder / "iteration_000777.png").write_bytes(b"sheet")
    (sheet,) = (one for one in server.ask("artifacts", job["id"]) if one["iteration"] == 777)
    (folder / sheet["name"]).unlink()
    with pytest.raises(BackendError, match="no samples/iteration_000777.png") as caught:
        server.ask("download", job["id"], sheet, tmp_path / "sheet.png")
    assert caught.value.kind == "UnknownFile" and list(tmp_path.iterdir()) == []
    run = Run(folder.parent)  # and when it goes between two steps of one answer
    files, gone = run.artifacts(), folder / sheet["name"]
    monkeypatch.setattr(run, "_listed", lambda kind, listed=run._listed: [*listed(kind), (777, gone)])
    assert run.artifacts() == files
    monkeypatch.setattr(run, "file", lambda kind, name: gone)
    with pytest.raises(UnknownFile, match="any more"):
        run.sheet(sheet["name"])


def test_a_file_whose_checksum_is_wrong_is_not_kept(finished, tmp_path):
    server, job = finished
    artifact = server.ask("artifacts", job["id"])[0] | {"sha256": "0" * 64}
    with pytest.raises(BackendUnreachable, match="damaged"):
        server.ask("download", job["id"], artifact, tmp_path / "lora.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "BadRequest"),
        (b"[1]", "BadRequest"),
        (b"[" * 100_000, "BadRequest"),
        (b"{}", "BadRequest"),
        (b'{"spec": {}, "python": "/bin/sh"}', "BadRequest"),
        (b'{"spec": {}, "detached": "yes"}', "BadRequest"),
        (b'{"spec": {}}', "SpecError"),
        (json.dumps({"spec": fields(iterations=0)}).encode(), "SpecError"),
        (json.dumps({"spec": fields(server="http://evil.example")}).encode(), "SpecError"),
    ],
)
def test_a_submission_that_cannot_be_one_is_refused_in_words(finished, body, kind):
    answer = request(finished[0], "POST", "/v1/jobs", {"Content-Type": "application/json"}, body)
    assert refusal(answer) == (400, kind)


def test_a_body_too_large_and_a_form_are_refused(finished):
    server, _ = finished
    assert request(server, "POST", "/v1/jobs", {"Content-Type": "application/json"}, b" " * (5 * 2**20))[0] == 413
    form = request(server, "POST", "/v1/jobs", {"Content-Type": "application/x-www-form-urlencoded"}, b"{}")
    assert refusal(form) == (400, "BadRequest")


@pytest.mark.parametrize("query", ["after=x", "after=-1", "after=nan", "wait=31", "wait=inf"])
def test_numbers_in_a_query_are_checked(finished, query):
    server, job = finished
    assert refusal(request(server, "GET", f"/v1/jobs/{job['id']}/events?{query}")) == (400, "BadRequest")


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_only_the_owner_can_read_token_and_jobs(finished):
    data = finished[0].data
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    for name in ("server.json", "jobs.sqlite"):
        assert stat.S_IMODE((data / name).stat().st_mode) == 0o600
