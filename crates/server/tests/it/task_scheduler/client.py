#!/usr/bin/env python3
"""A client of the task-scheduler API, written from its description alone.

It knows the endpoints, fields, headers and messages of that API and nothing of Faena. Every check that fails is printed, and
the exit code is then 1.

    python client.py http://127.0.0.1:3000
"""
from __future__ import annotations

import contextlib
import http.server
import json
import queue
import re
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any, Callable, Optional

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

URL = sys.argv[1].rstrip("/")
LIMIT_SECONDS = 60
failures: list[str] = []


# ------------------------------------------------------------------------------------------------------------------- helpers


def check(condition: bool, what: str, found: Any = None) -> None:
    if not condition:
        failures.append(f"{what}: found {json.dumps(found, default=str)}")


def same(found: Any, expected: Any, what: str) -> None:
    check(found == expected, f"{what} is {expected!r}", found)


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers = status, headers
        self.body: Any = json.loads(body) if body else None


def call(method: str, path: str, body: Optional[dict[str, Any]] = None) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            result = Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        result = Answer(error.code, error.headers, error.read())
    check(bool(result.headers.get("X-Request-Id")), f"{method} {path} has X-Request-Id")
    check(re.fullmatch(r"[\d.]+ms", result.headers.get("X-Response-Time", "")) is not None, f"{method} {path} has X-Response-Time")
    return result


def expect(status: int, method: str, path: str, body: Optional[dict[str, Any]] = None) -> Any:
    """Checks the status. Where the description names none, any success is right."""
    answer = call(method, path, body)
    is_right = answer.status == status or (status == 200 and 200 <= answer.status < 300)
    check(is_right, f"{method} {path} answers {status}", [answer.status, answer.body])
    return answer.body if isinstance(answer.body, dict) else {}


def eventually(what: str, find: Callable[[], Any]) -> Any:
    until = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until:
        found = find()
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError(what)


def job_with_status(job_id: str, status: str) -> Any:
    def find() -> Any:
        job = expect(200, "GET", f"/api/v1/jobs/{job_id}")
        return job if job.get("status") == status else None

    return eventually(f"job {job_id} is {status}", find)


def is_date(text: Any) -> bool:
    try:
        datetime.fromisoformat(str(text).replace("Z", "+00:00"))
        return True
    except ValueError:
        return False


def has_fields(found: dict[str, Any], names: list[str], what: str) -> None:
    for name in names:
        check(name in found, f"{what} has {name}", sorted(found))


def create(**fields: Any) -> str:
    job = expect(201, "POST", "/api/v1/jobs", fields)
    has_fields(job, ["id", "status", "createdAt"], "a created job")
    check(is_date(job.get("createdAt")), "createdAt is a date", job.get("createdAt"))
    return str(job.get("id"))


# --------------------------------------------------------------------------------------------- a worker and a webhook receiver


class Worker(threading.Thread):
    """Knows register, job, complete, fail and heartbeat. Ignores messages of other types, and sends no heartbeat itself."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: "queue.Queue[dict[str, Any]]" = queue.Queue()
        self.heartbeats = 0
        self.failed_once: set[str] = set()
        # Stays open as long as this process.
        self.socket = contextlib.ExitStack().enter_context(connect(URL.replace("http", "ws", 1) + "/api/v1/workers/connect"))
        self.socket.send(json.dumps({"type": "register", "workerId": "document-worker", "capabilities": ["email.send", "report.build"]}))

    def run(self) -> None:
        try:
            for text in self.socket:
                message = json.loads(text)
                if message["type"] == "heartbeat":
                    self.heartbeats += 1
                elif message["type"] == "job":
                    self.process(message["job"])
        except ConnectionClosed:
            pass

    def process(self, job: dict[str, Any]) -> None:
        self.seen.put(job)
        behaviour = job["payload"].get("behaviour")
        if behaviour == "fail":
            self.socket.send(json.dumps({"type": "fail", "jobId": job["id"], "error": "mailbox full"}))
            return
        if behaviour == "fail once" and job["id"] not in self.failed_once:
            self.failed_once.add(job["id"])
            self.socket.send(json.dumps({"type": "fail", "jobId": job["id"], "error": "try later"}))
            return
        time.sleep(job["payload"].get("seconds", 0))
        self.socket.send(json.dumps({"type": "complete", "jobId": job["id"], "result": {"sent": True}}))


class Receiver(http.server.BaseHTTPRequestHandler):
    received: "queue.Queue[tuple[dict[str, str], dict[str, Any]]]" = queue.Queue()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Receiver.received.put(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def start_receiver() -> str:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/hook"


def next_webhook(job_id: str) -> tuple[dict[str, str], dict[str, Any]]:
    headers, body = Receiver.received.get(timeout=LIMIT_SECONDS)
    same(body.get("jobId"), job_id, "jobId of the webhook")
    same(headers.get("content-type"), "application/json", "Content-Type of the webhook")
    same(headers.get("x-webhook-event"), "job.status", "X-Webhook-Event")
    same(headers.get("x-job-id"), job_id, "X-Job-Id")
    check(is_date(body.get("completedAt")), "completedAt of the webhook is a date", body)
    return headers, body


# ------------------------------------------------------------------------------------------------------------------ the checks


def health() -> None:
    same(expect(200, "GET", "/health/live"), {"status": "ok"}, "liveness")
    ready = expect(200, "GET", "/health/ready")
    check(ready.get("status") in ("healthy", "degraded"), "readiness has a status", ready)
    database, workers = ready["checks"]["database"], ready["checks"]["workers"]
    check(isinstance(database["latencyMs"], (int, float)) and database["status"] == "healthy", "the database is healthy", database)
    check(isinstance(workers["activeCount"], int) and "status" in workers, "the workers are counted", workers)


def jobs() -> None:
    job_id = create(name="later", payload={"a": 1}, priority="HIGH", maxRetries=5, retryDelay=2000, type="report.unknown")
    job = expect(200, "GET", f"/api/v1/jobs/{job_id}")
    has_fields(job, ["id", "name", "status", "payload", "priority", "maxRetries", "retryCount", "retryDelay", "createdAt", "updatedAt"], "a job")
    same([job.get(name) for name in ("name", "type", "payload", "priority", "maxRetries", "retryDelay", "retryCount")],
         ["later", "report.unknown", {"a": 1}, "HIGH", 5, 2000, 0], "the fields of a job")
    same(job.get("status"), "QUEUED", "status of a job that waits")

    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    scheduled = create(name="tomorrow", type="report.unknown", scheduledAt=tomorrow.isoformat())
    same(expect(200, "GET", f"/api/v1/jobs/{scheduled}").get("payload"), {}, "the default payload")
    # A date may also be given in milliseconds since 1970, or as a day.
    create(name="tomorrow", type="report.unknown", scheduledAt=int(tomorrow.timestamp() * 1000))
    create(name="tomorrow", type="report.unknown", scheduledAt=tomorrow.date().isoformat())

    cancelled = expect(200, "POST", f"/api/v1/jobs/{job_id}/cancel")
    same([cancelled.get("id"), cancelled.get("status")], [job_id, "CANCELLED"], "the answer to cancel")
    retried = expect(200, "POST", f"/api/v1/jobs/{job_id}/retry")
    same([retried.get("id"), retried.get("status"), retried.get("retryCount")], [job_id, "PENDING", 0], "the answer to retry")
    expect(200, "POST", f"/api/v1/jobs/{job_id}/cancel")
    same(expect(200, "DELETE", f"/api/v1/jobs/{job_id}"), {"success": True}, "the answer to delete")
    missing = expect(404, "GET", f"/api/v1/jobs/{job_id}")
    same(missing.get("error", {}).get("code"), "NOT_FOUND", "code of a missing job")


def invalid_requests() -> None:
    wrong = expect(400, "POST", "/api/v1/jobs", {"name": "", "type": "x", "priority": "URGENT", "maxRetries": 11, "retryDelay": 1})
    error = wrong.get("error", {})
    same(error.get("code"), "VALIDATION_ERROR", "code of an invalid job")
    paths = [detail["path"].split(".")[-1] for detail in error.get("details", []) if "message" in detail]
    same(sorted(paths), ["maxRetries", "name", "priority", "retryDelay"], "the invalid fields")
    same(expect(400, "GET", "/api/v1/jobs/not-a-uuid").get("error", {}).get("code"), "VALIDATION_ERROR", "code of an invalid id")
    same(expect(400, "GET", "/api/v1/jobs?limit=101").get("error", {}).get("code"), "VALIDATION_ERROR", "code of an invalid limit")
    same(expect(404, "GET", f"/api/v1/jobs/{uuid.uuid4()}").get("error", {}).get("code"), "NOT_FOUND", "code of an unknown job")


def lists() -> None:
    for number in range(5):
        create(name=f"listed {number}", type="list.me", priority="CRITICAL" if number == 0 else "LOW")
    answer = call("GET", "/api/v1/jobs?type=list.me&status=QUEUED&priority=LOW&page=2&limit=3")
    body = answer.body
    same([len(body["jobs"]), body["total"], body["page"], body["limit"]], [1, 4, 2, 3], "the second page")
    headers = [answer.headers.get(name) for name in ("X-Total-Count", "X-Page", "X-Limit", "X-Total-Pages")]
    same(headers, ["4", "2", "3", "2"], "the headers of a list")
    first = call("GET", "/api/v1/jobs?type=list.me").body
    same([len(first["jobs"]), first["page"], first["limit"]], [5, 1, 20], "the default page")
    has_fields(first["jobs"][0], ["id", "name", "status", "priority"], "a listed job")


def working(worker: Worker, hook: str) -> None:
    # Longer than the server accepts silence, although this worker never sends a heartbeat.
    job_id = create(name="welcome mail", type="email.send", payload={"to": "ada@example.org", "seconds": 2}, webhookUrl=hook)
    seen = worker.seen.get(timeout=LIMIT_SECONDS)
    same([seen["id"], seen["name"], seen["payload"]["to"]], [job_id, "welcome mail", "ada@example.org"], "the job that the worker got")
    processing = job_with_status(job_id, "PROCESSING")
    same(processing.get("workerId"), "document-worker", "workerId")
    check(is_date(processing.get("startedAt")), "startedAt is a date", processing.get("startedAt"))
    done = job_with_status(job_id, "COMPLETED")
    same([done["result"], done.get("error"), done["retryCount"]], [{"sent": True}, None, 0], "the completed job")
    check(is_date(done.get("completedAt")), "completedAt is a date", done.get("completedAt"))
    _, body = next_webhook(job_id)
    same([body.get("jobType"), body.get("status"), body.get("result")], ["email.send", "completed", {"sent": True}], "the webhook")
    check(worker.heartbeats > 0, "the server sends heartbeats", worker.heartbeats)

    retried = create(name="second try", type="report.build", payload={"behaviour": "fail once"}, maxRetries=1, retryDelay=100)
    same(job_with_status(retried, "COMPLETED").get("retryCount"), 1, "retryCount after one retry")


def dead_letters(hook: str) -> None:
    job_id = create(name="hopeless", type="email.send", payload={"behaviour": "fail", "to": "x"}, maxRetries=0, priority="HIGH", webhookUrl=hook)
    failed = job_with_status(job_id, "FAILED")
    same(failed.get("error"), "mailbox full", "error of a failed job")
    _, body = next_webhook(job_id)
    same([body.get("status"), body.get("error")], ["failed", "mailbox full"], "the webhook of a failed job")

    listed = expect(200, "GET", "/api/v1/dead-letter?jobType=email.send&page=1&limit=10")
    same([listed.get(name) for name in ("total", "page", "limit", "totalPages")], [1, 1, 10, 1], "the page of dead letters")
    same(expect(200, "GET", "/api/v1/dead-letter?jobType=other").get("total"), 0, "dead letters of another type")
    letter = listed["data"][0]
    shown = expect(200, "GET", f"/api/v1/dead-letter/{letter['id']}")
    for name, expected in [("originalJobId", job_id), ("jobName", "hopeless"), ("jobType", "email.send"), ("failureReason", "mailbox full")]:
        same(letter.get(name), expected, f"{name} of a listed dead letter")
        same(shown.get(name), expected, f"{name} of a dead letter")
    stats = expect(200, "GET", "/api/v1/dead-letter/stats")
    same([stats.get("total"), stats.get("byType")], [1, [{"jobType": "email.send", "count": 1}]], "the statistics of dead letters")
    check(is_date(stats.get("oldest")) and is_date(stats.get("newest")), "oldest and newest are dates", stats)

    retried = expect(200, "POST", f"/api/v1/dead-letter/{letter['id']}/retry")
    same(retried.get("status"), "QUEUED", "status of a retried dead letter")
    check("id" in retried, "the answer to retry has an id", retried)
    again = eventually("the job is a dead letter again", lambda: expect(200, "GET", "/api/v1/dead-letter")["data"])
    answer = call("DELETE", f"/api/v1/dead-letter/{again[0]['id']}")
    same([answer.status, answer.body], [204, None], "the answer to deleting a dead letter")
    same(expect(200, "GET", "/api/v1/dead-letter/stats").get("total"), 0, "dead letters that are left")


def schedules() -> None:
    created = expect(201, "POST", "/api/v1/schedules", {
        "name": "nightly", "cronExpression": "0 3 * * *", "jobName": "email.send", "jobPayload": {"to": "all"}, "timezone": "America/Bogota"})
    has_fields(created, ["id", "nextRunAt"], "a created schedule")
    next_run = datetime.fromisoformat(created["nextRunAt"].replace("Z", "+00:00"))
    same([next_run.hour, next_run.minute], [8, 0], "three in the morning in Bogota, in UTC")
    schedule = f"/api/v1/schedules/{created['id']}"
    other = expect(201, "POST", "/api/v1/schedules", {
        "name": "often", "description": "every hour", "intervalMs": 3_600_000, "jobName": "email.send", "jobPayload": {}, "jobPriority": "LOW",
        "maxRetries": 1, "isActive": False})

    listed = expect(200, "GET", "/api/v1/schedules?isActive=true&page=1&limit=5")
    same([listed.get("total"), [item["name"] for item in listed["schedules"]]], [1, ["nightly"]], "the active schedules")
    shown = expect(200, "GET", schedule)
    has_fields(shown, ["id", "name", "cronExpression", "nextRunAt", "jobs"], "a schedule")
    same([shown["cronExpression"], shown.get("lastRunAt"), shown["jobs"]], ["0 3 * * *", None, []], "a schedule that has not run")

    triggered = expect(200, "POST", f"{schedule}/trigger")
    job = job_with_status(triggered["jobId"], "COMPLETED")
    same([job["scheduleId"], job["payload"]], [created["id"], {"to": "all"}], "the job of a schedule")
    after = expect(200, "GET", schedule)
    same([item["id"] for item in after["jobs"]], [triggered["jobId"]], "the jobs of a schedule")
    check(is_date(after.get("lastRunAt")), "lastRunAt is a date", after.get("lastRunAt"))

    changed = expect(200, "PATCH", schedule, {"isActive": False, "cronExpression": "30 4 * * *"})
    same(changed.get("id"), created["id"], "id of a changed schedule")
    check(is_date(changed.get("updatedAt")), "updatedAt is a date", changed.get("updatedAt"))
    shown = expect(200, "GET", schedule)
    same([shown["isActive"], shown["cronExpression"]], [False, "30 4 * * *"], "the changed schedule")
    for path in (schedule, f"/api/v1/schedules/{other.get('id')}"):
        same(expect(200, "DELETE", path), {"success": True}, "the answer to deleting a schedule")
    expect(404, "GET", schedule)


def main() -> int:
    hook = start_receiver()
    worker = Worker()
    worker.start()
    parts: list[Callable[[], None]] = [health, jobs, invalid_requests, lists, lambda: working(worker, hook), lambda: dead_letters(hook), schedules]
    for part in parts:
        try:
            part()
        except Exception:
            failures.append(traceback.format_exc())
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
