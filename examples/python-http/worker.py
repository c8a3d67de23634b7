#!/usr/bin/env python3
"""A Faena worker over plain HTTP. Needs Python 3.9 and nothing else.

    python3 examples/python-http/worker.py
"""
from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from typing import Any, Callable, Optional

Json = dict[str, Any]

URL = os.environ.get("FAENA_URL", "http://127.0.0.1:3000").rstrip("/") + "/api/v1/workers"
TOKEN = os.environ.get("FAENA_TOKEN")


class Failed(Exception):
    """An error with which a handler controls retries. Any other error that a handler raises is retried."""

    def __init__(self, message: str, retryable: bool = True, retry_after_ms: Optional[int] = None) -> None:
        super().__init__(message)
        self.retryable, self.retry_after_ms = retryable, retry_after_ms


# ------------------------------------------------------------- your handlers


def greet(job: Job, payload: Json) -> Json:
    if not payload.get("name"):
        raise Failed("the name is empty", retryable=False)
    job.progress({"phase": "greeting", "percentage": 50})
    # A step that an earlier run has completed does not run again; its stored result is used.
    greeting = job.step("greeting", lambda: "Hello, " + payload["name"])
    # Long work checks now and then whether the job was cancelled.
    until = time.monotonic() + payload.get("seconds", 0)
    while time.monotonic() < until and not job.cancelled:
        time.sleep(0.05)
    return {"greeting": greeting}


HANDLERS: dict[str, Callable[[Job, Json], Any]] = {"greet": greet}

# --------------------------------------------------- the same for all handlers


class Rejected(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.status, self.code = status, code

    @property
    def is_temporary(self) -> bool:
        """The server is starting, stopping or overloaded: the same call may succeed later."""
        return self.status >= 500 or self.status == 429


# What a call raises if no answer arrives: the server is not reachable, or it stopped while it answered.
NO_ANSWER = (OSError, http.client.HTTPException, ValueError)


def call(method: str, path: str, body: Optional[Json] = None, session: Optional[str] = None, timeout: float = 30) -> Json:
    """Sends a request and returns the body. Raises Rejected for an error of the server, NO_ANSWER if it does not answer."""
    request = urllib.request.Request(URL + path, method=method)
    request.add_header("content-type", "application/json")
    if TOKEN:
        request.add_header("authorization", "Bearer " + TOKEN)
    if session:  # proves that the call comes from the worker that registered
        request.add_header("x-session-token", session)
    data = None if method == "DELETE" else json.dumps(body or {}).encode()
    try:
        with urllib.request.urlopen(request, data, timeout) as answer:
            result: Json = json.load(answer)
            return result
    except urllib.error.HTTPError as error:
        try:
            info = json.load(error)["error"]
        except Exception:
            info = {"code": "UNKNOWN", "message": f"answered {error.code}"}
        raise Rejected(error.code, info["code"], info["message"]) from None


class Job:
    """One run of one job."""

    def __init__(self, worker: Worker, data: Json) -> None:
        self.worker = worker
        self.id: str = data["id"]
        self.run: int = data["run"]
        self.type: str = data["type"]
        self.payload: Json = data["payload"]
        self.steps: Json = {step["name"]: step["result"] for step in data.get("steps", [])}

    @property
    def cancelled(self) -> bool:
        """True if the job was cancelled or exceeded its timeout. Long work should check it now and then."""
        return self.id in self.worker.cancelled

    def report(self, kind: str, **fields: Any) -> Json:
        """Sends a report until it is answered, by this server or after its restart. The server counts a repeated report once."""
        while True:
            try:
                path = f"/{self.worker.id}/jobs/{self.id}/{kind}"
                return call("POST", path, {"run": self.run, **fields}, self.worker.session_token)
            except Rejected as rejected:
                if not rejected.is_temporary:
                    raise
            except NO_ANSWER:
                pass
            time.sleep(1)

    def progress(self, progress: Json) -> None:
        self.report("progress", progress=progress)

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        if name not in self.steps:
            result = work()
            self.report("step", name=name, result=result)  # raises if the job was assigned to another worker
            self.steps[name] = result
        return self.steps[name]


class Worker:
    def __init__(self) -> None:
        # A worker pool sets the id and the token of its processes; otherwise the server chooses them, and the worker keeps them.
        self.id: Optional[str] = os.environ.get("FAENA_WORKER_ID")
        self.session_token: Optional[str] = os.environ.get("FAENA_SESSION_TOKEN")
        self.interval: float = 30
        self.cancelled: set[str] = set()
        self.registered = self.waiting = self.stopping = False

    def register(self) -> None:
        body = {"workerId": self.id, "sessionToken": self.session_token, "name": "python-http",
                "capabilities": list(HANDLERS), "concurrency": 1}
        answer = call("POST", "/register", {key: value for key, value in body.items() if value})
        self.id, self.interval = answer["workerId"], answer["heartbeatIntervalMs"] / 1000
        self.session_token = answer.get("sessionToken")
        if not self.registered:
            threading.Thread(target=self.send_heartbeats, daemon=True).start()
        self.registered = True
        print("registered as", self.id, flush=True)

    def send_heartbeats(self) -> None:
        """Runs on its own thread, because a handler may take a long time."""
        while True:
            time.sleep(self.interval)
            try:
                self.handle(call("POST", f"/{self.id}/heartbeat", session=self.session_token))
            except (Rejected, *NO_ANSWER):
                pass  # the next claim shows what is wrong

    def handle(self, answer: Json) -> None:
        self.cancelled.update(cancel["jobId"] for cancel in answer.get("cancel", []))
        self.stopping = self.stopping or answer.get("drain", False)

    def stop(self, *_: Any) -> None:
        self.stopping = True
        if self.waiting:  # no job runs; a job that is on its way is released when the worker leaves
            raise KeyboardInterrupt

    def claim(self) -> list[Json]:
        self.waiting = True
        try:
            answer = call("POST", f"/{self.id}/claim", {"max": 1, "waitMs": 20000}, self.session_token)
        finally:
            self.waiting = False
        self.handle(answer)
        jobs: list[Json] = answer["jobs"]
        return jobs

    def run_job(self, job: Job) -> None:
        try:
            result = HANDLERS[job.type](job, job.payload)
            job.report("complete", result=result)
        except Rejected as rejected:
            print(job.id, rejected, flush=True)  # assigned to another worker
        except Exception as error:
            fields = {"error": str(error) or repr(error), "retryable": getattr(error, "retryable", True)}
            if getattr(error, "retry_after_ms", None):
                fields["retryAfterMs"] = getattr(error, "retry_after_ms")
            try:
                job.report("fail", **fields)
            except Rejected as rejected:
                print(job.id, rejected, flush=True)
        self.cancelled.discard(job.id)

    def pause(self, reason: object) -> None:
        print("not connected:", reason, flush=True)
        self.waiting = True
        try:
            time.sleep(1)
        finally:
            self.waiting = False

    def work(self) -> None:
        """Claims jobs until the worker stops. Survives restarts of the server: it keeps its id and its job."""
        while not self.stopping:
            try:
                if not self.registered:
                    self.register()
                for data in self.claim():
                    self.run_job(Job(self, data))
            except Rejected as rejected:
                if rejected.is_temporary:
                    self.pause(rejected)
                elif rejected.status == 404:
                    self.register_again()
                else:
                    raise
            except NO_ANSWER as error:
                self.pause(error)

    def register_again(self) -> None:
        """The server has declared this worker lost, so its session has ended."""
        self.session_token = None
        try:
            self.register()
        except (Rejected, *NO_ANSWER) as error:
            self.pause(error)


def main() -> None:
    worker = Worker()
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, worker.stop)
    try:
        worker.work()
    except KeyboardInterrupt:
        pass
    if worker.registered:
        try:
            call("DELETE", f"/{worker.id}", session=worker.session_token, timeout=5)
        except (Rejected, *NO_ANSWER):
            pass  # the server notices that the worker is silent
        print("left", flush=True)


if __name__ == "__main__":
    main()
