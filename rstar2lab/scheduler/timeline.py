"""What each engine held over time, from the log of a run: the data of Fig 7, simulated or real."""

from collections.abc import Iterable

import pandas as pd

from .events import Event

_COLUMNS = ["time", "engine", "turns", "tools", "kv_tokens", "ledger_tokens", "mark"]


def timeline(events: Iterable[Event]) -> pd.DataFrame:
    """One row per event of an engine: its state from then on.

    Columns: time (s), engine, turns (asked of it and not ended), tools (trajectories of it that
    wait for one), kv_tokens (held for running requests), ledger_tokens (reserved), mark ("preempt",
    "barrier": a tool call held back starts, "down", "up", or "").
    """
    turns: dict[str, set[str]] = {}
    tools: dict[str, set[str]] = {}
    home, ended, rows = {}, {}, []
    for event in events:
        engine, mark = event.engine or home.get(event.traj, ""), ""
        asked, waits = turns.setdefault(engine, set()), tools.setdefault(engine, set())
        if event.kind == "start":
            waits.discard(event.traj)
            tools.get(home.get(event.traj), set()).discard(event.traj)
            asked.add(event.traj)
            home[event.traj] = engine
        elif event.kind == "turn":
            asked.discard(event.traj)
            waits.add(event.traj)
            ended[event.traj] = event.time
        elif event.kind in ("finish", "lost"):
            asked.discard(event.traj)
            waits.discard(event.traj)
        elif event.kind == "call":
            mark = "barrier" if event.time > ended[event.traj] + 1e-9 else ""
        elif event.kind in ("preempt", "down", "up"):
            mark = event.kind
        if engine and event.kind != "tool":
            kv = (event.gauge, event.ledger) if event.engine else (None, None)
            rows.append((event.time, engine, len(asked), len(waits), *kv, mark))
    found = pd.DataFrame(rows, columns=_COLUMNS)
    held = found.groupby("engine")[["kv_tokens", "ledger_tokens"]].ffill().fillna(0)
    return found.assign(**held.astype("int64"))
