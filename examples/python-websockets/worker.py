#!/usr/bin/env python3
"""A Faena worker over the WebSocket. Needs Python 3.9 and the package websockets.

    pip install websockets && python3 examples/python-websockets/worker.py
"""
import asyncio
import json
import os
import signal
import uuid

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

URL = os.environ.get("FAENA_URL", "http://127.0.0.1:3000").rstrip("/").replace("http", "ws", 1) + "/api/v1/workers/connect"
TOKEN = os.environ.get("FAENA_TOKEN")
CONCURRENCY = 8


class Failed(Exception):
    """The error of a handler. Any other error that a handler raises is retried."""

    def __init__(self, message, retryable=True, retry_after_ms=None):
        super().__init__(message)
        self.retryable, self.retry_after_ms = retryable, retry_after_ms


# ------------------------------------------------------------- your handlers


async def greet(job, payload):
    if not payload.get("name"):
        raise Failed("the name is empty", retryable=False)
    await job.progress({"phase": "greeting", "percentage": 50})

    async def make_greeting():
        return "Hello, " + payload["name"]

    # A step that an earlier run has completed does not run again; its stored result is used.
    return {"greeting": await job.step("greeting", make_greeting)}


HANDLERS = {"greet": greet}

# --------------------------------------------------- the same for all handlers


class Refused(Exception):
    """The server refused a report: the job has been assigned to another worker."""


class Job:
    """One run of one job."""

    def __init__(self, worker, data):
        self.worker, self.id, self.run = worker, data["id"], data["run"]
        self.type, self.payload = data["type"], data["payload"]
        self.steps = {step["name"]: step["result"] for step in data.get("steps", [])}
        self.cancelled = asyncio.Event()  # check it in long work

    async def progress(self, progress):
        await self.worker.send({"type": "progress", "jobId": self.id, "run": self.run, "progress": progress})

    async def step(self, name, work):
        if name not in self.steps:
            result = await work()
            await self.report("step", name=name, result=result)
            self.steps[name] = result
        return self.steps[name]

    async def report(self, kind, **fields):
        """Sends a report and returns when the server has acknowledged it, over this connection or a later one."""
        frame = {"type": kind, "jobId": self.id, "run": self.run, **fields}
        acknowledged = asyncio.get_running_loop().create_future()
        self.worker.reports.append((frame, acknowledged))
        await self.worker.send(frame)
        await acknowledged


class Worker:
    def __init__(self):
        # The same after a reconnect, so that running jobs stay with this worker. A worker pool sets it for its processes.
        self.id = os.environ.get("FAENA_WORKER_ID") or str(uuid.uuid4())
        self.socket = None
        self.jobs, self.tasks, self.reports = {}, set(), []  # reports: not acknowledged yet
        self.stopping = asyncio.Event()

    async def send(self, frame):
        """Sends a frame if there is a connection. Reports are sent again over the next one."""
        if self.socket:
            try:
                await self.socket.send(json.dumps(frame))
            except ConnectionClosed:
                pass

    async def work(self):
        headers = {"authorization": "Bearer " + TOKEN} if TOKEN else None
        # `async for` reconnects with growing delays.
        async for socket in connect(URL, additional_headers=headers, max_size=2**24):
            try:
                await self.run_connection(socket)
            except ConnectionClosed:
                pass
            finally:
                self.socket = None
            if self.stopping.is_set() and not self.jobs:
                return

    async def run_connection(self, socket):
        in_flight = [{"jobId": job.id, "run": job.run} for job in self.jobs.values()]
        register = {"type": "register", "workerId": self.id, "name": "python-websockets", "token": TOKEN, "inFlight": in_flight,
                    "capabilities": list(HANDLERS), "concurrency": CONCURRENCY}
        await socket.send(json.dumps({key: value for key, value in register.items() if value is not None}))
        registered = json.loads(await socket.recv())
        if registered["type"] != "registered":
            raise SystemExit(f"refused: {registered}")
        print("registered as", self.id, flush=True)
        self.socket = socket
        if not registered.get("resumed"):
            for job in self.jobs.values():  # disconnected for too long: assigned to other workers
                job.cancelled.set()
        for frame, _ in list(self.reports):
            await self.send(frame)
        tasks = [asyncio.create_task(self.send_heartbeats(registered["heartbeatIntervalMs"] / 1000)), asyncio.create_task(self.drain())]
        try:
            async for text in socket:
                self.handle(json.loads(text))
        finally:
            for task in tasks:
                task.cancel()

    def handle(self, frame):
        kind = frame["type"]
        if kind == "job":
            job = Job(self, frame["job"])
            self.jobs[job.id] = job
            task = asyncio.create_task(self.run_job(job))
            self.tasks.add(task)  # the event loop keeps only a weak reference to a task
            task.add_done_callback(self.tasks.discard)
        elif kind == "ack":
            self.acknowledge(frame)
        elif kind == "cancel" and frame["jobId"] in self.jobs:
            self.jobs[frame["jobId"]].cancelled.set()
        elif kind == "drain":
            self.stopping.set()
        elif kind == "error":
            print("error:", frame["error"], flush=True)

    def acknowledge(self, ack):
        for entry in self.reports:
            frame, acknowledged = entry
            if frame["jobId"] == ack["jobId"] and frame["type"] == ack.get("of") and frame["run"] == ack.get("run", frame["run"]):
                self.reports.remove(entry)
                if not acknowledged.done():
                    if ack.get("ok"):
                        acknowledged.set_result(None)
                    else:
                        acknowledged.set_exception(Refused(ack.get("error")))
                return

    async def run_job(self, job):
        try:
            result = await HANDLERS[job.type](job, job.payload)
            await job.report("complete", result=result)
        except Refused as refused:
            print(job.id, refused, flush=True)
        except Exception as error:
            fields = {"error": str(error) or repr(error), "retryable": getattr(error, "retryable", True)}
            if getattr(error, "retry_after_ms", None):
                fields["retryAfterMs"] = error.retry_after_ms
            try:
                await job.report("fail", **fields)
            except Refused as refused:
                print(job.id, refused, flush=True)
        finally:
            if self.jobs.get(job.id) is job:
                del self.jobs[job.id]

    async def send_heartbeats(self, interval):
        while True:
            await asyncio.sleep(interval)
            await self.send({"type": "heartbeat"})

    async def drain(self):
        """Waits for a shutdown, then finishes the running jobs and leaves."""
        await self.stopping.wait()
        await self.send({"type": "drain"})
        while self.jobs:
            await asyncio.wait(list(self.tasks))
        await self.send({"type": "leave"})
        print("left", flush=True)
        await self.socket.close()


async def main():
    worker = Worker()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, worker.stopping.set)
    working = asyncio.create_task(worker.work())
    stopping = asyncio.create_task(worker.stopping.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    if worker.socket or worker.jobs or working.done():
        await working
    # Otherwise there is no server to leave; asyncio.run ends the attempts to connect.


if __name__ == "__main__":
    asyncio.run(main())
