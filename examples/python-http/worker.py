#!/usr/bin/env python3
"""A Faena worker over plain HTTP. Needs Python 3.9 and nothing else.

    python3 examples/python-http/worker.py
"""
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

URL = os.environ.get("FAENA_URL", "http://127.0.0.1:3000").rstrip("/") + "/api/v1/workers"
TOKEN = os.environ.get("FAENA_TOKEN")


class Failed(Exception):
    """The error of a handler. Any other error that a handler raises is retried."""

    def __init__(self, message, retryable=True, retry_after_ms=None):
        super().__init__(message)
        self.retryable, self.retry_after_ms = retryable, retry_after_ms


# ------------------------------------------------------------- your handlers


def greet(job, payload):
    if not payload.get("name"):
        raise Failed("the name is empty", retryable=False)
    job.progress({"phase": "greeting", "percentage": 50})
    # A step that an earlier run has completed does not run again; its stored result is used.
    greeting = job.step("greeting", lambda: "Hello, " + payload["name"])
    return {"greeting": greeting}


HANDLERS = {"greet": greet}

# --------------------------------------------------- the same for all handlers


class Refused(Exception):
    def __init__(self, status, code, message):
        super().__init__(f"{message} ({code})")
        self.status, self.code = status, code


def call(method, path, body=None, timeout=30):
    """Sends a request and returns the body. Raises Refused for an error of the server, OSError if it does not answer."""
    request = urllib.request.Request(URL + path, method=method)
    request.add_header("content-type", "application/json")
    if TOKEN:
        request.add_header("authorization", "Bearer " + TOKEN)
    data = None if method == "DELETE" else json.dumps(body or {}).encode()
    try:
        with urllib.request.urlopen(request, data, timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            info = json.load(error)["error"]
        except Exception:
            info = {"code": "UNKNOWN", "message": f"answered {error.code}"}
        raise Refused(error.code, info["code"], info["message"]) from None


class Job:
    """One run of one job."""

    def __init__(self, worker, data):
        self.worker, self.id, self.run = worker, data["id"], data["run"]
        self.type, self.payload = data["type"], data["payload"]
        self.steps = {step["name"]: step["result"] for step in data.get("steps", [])}

    @property
    def cancelled(self):
        """Check it in long work: the job was cancelled, or exceeded its timeout."""
        return self.id in self.worker.cancelled

    def report(self, kind, **fields):
        """Sends a report until it is answered. The server counts a repeated report once."""
        while True:
            try:
                return call("POST", f"/{self.worker.id}/jobs/{self.id}/{kind}", {"run": self.run, **fields})
            except Refused as refused:
                if refused.status < 500:
                    raise
            except OSError:
                pass
            time.sleep(1)

    def progress(self, progress):
        self.report("progress", progress=progress)

    def step(self, name, work):
        if name not in self.steps:
            result = work()
            self.report("step", name=name, result=result)  # raises if the job was assigned to another worker
            self.steps[name] = result
        return self.steps[name]


class Worker:
    def __init__(self):
        # A worker pool sets the id of its processes; otherwise the server chooses one.
        self.id, self.interval = os.environ.get("FAENA_WORKER_ID"), 30
        self.registered, self.cancelled, self.waiting, self.stopping = False, set(), False, False

    def register(self):
        body = {"workerId": self.id, "name": "python-http", "capabilities": list(HANDLERS), "concurrency": 1}
        answer = call("POST", "/register", {key: value for key, value in body.items() if value})
        self.id, self.interval = answer["workerId"], answer["heartbeatIntervalMs"] / 1000
        self.registered = True
        print("registered as", self.id, flush=True)

    def send_heartbeats(self):
        """Runs on its own thread, because a handler may take long."""
        while True:
            time.sleep(self.interval)
            try:
                self.handle(call("POST", f"/{self.id}/heartbeat"))
            except (Refused, OSError):
                pass  # the next claim shows what is wrong

    def handle(self, answer):
        self.cancelled.update(cancel["jobId"] for cancel in answer.get("cancel", []))
        self.stopping = self.stopping or answer.get("drain", False)

    def stop(self, *_):
        self.stopping = True
        if self.waiting:  # no job runs; a job that is on its way is released when the worker leaves
            raise KeyboardInterrupt

    def claim(self):
        self.waiting = True
        try:
            answer = call("POST", f"/{self.id}/claim", {"max": 1, "waitMs": 20000})
        finally:
            self.waiting = False
        self.handle(answer)
        return answer["jobs"]

    def run_job(self, job):
        try:
            result = HANDLERS[job.type](job, job.payload)
            job.report("complete", result=result)
        except Refused as refused:
            print(job.id, refused, flush=True)  # assigned to another worker
        except Exception as error:
            fields = {"error": str(error) or repr(error), "retryable": getattr(error, "retryable", True)}
            if getattr(error, "retry_after_ms", None):
                fields["retryAfterMs"] = error.retry_after_ms
            try:
                job.report("fail", **fields)
            except Refused as refused:
                print(job.id, refused, flush=True)
        self.cancelled.discard(job.id)

    def work(self):
        while not self.stopping:
            try:
                if not self.registered:
                    self.register()
                    threading.Thread(target=self.send_heartbeats, daemon=True).start()
                for data in self.claim():
                    self.run_job(Job(self, data))
            except Refused as refused:
                if refused.status != 404:
                    raise
                self.register()  # the server has declared this worker lost
            except OSError as error:
                print("not connected:", error, flush=True)
                time.sleep(2)


def main():
    worker = Worker()
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, worker.stop)
    try:
        worker.work()
    except KeyboardInterrupt:
        pass
    if worker.id:
        call("DELETE", f"/{worker.id}", timeout=5)
        print("left", flush=True)


if __name__ == "__main__":
    main()
