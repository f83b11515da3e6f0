"""The nodes' inputs and outputs as saved workflows know them, frozen in ``object_info.json``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from graph_server import GraphServer

FROZEN = Path(__file__).parent / "object_info.json"
UPDATE = "MIXGRPO_UPDATE=1 python -m pytest tests/comfyui/test_interfaces.py"
_MATTERS = ("default", "min", "max", "step", "options", "multiline", "control_after_generate")
_FILES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth")  # a list of the user's files is no part of an interface


def interface(info: dict[str, Any]) -> dict[str, Any]:
    """Inputs in their order, outputs in theirs; words for people are left out."""
    inputs = [
        {"name": name, "kind": kind, **_input(*spec)}
        for kind in ("required", "optional")
        for name, spec in info["input"].get(kind, {}).items()
    ]
    outputs = list(zip(info["output_name"], info["output"], info["output_is_list"], strict=True))
    return {"inputs": inputs, "outputs": [{"name": name, "type": kind, "is_list": many} for name, kind, many in outputs]}


def _input(kind: str | list[str], more: dict[str, Any] | None = None) -> dict[str, Any]:
    known = {"type": "COMBO" if isinstance(kind, list) else kind}
    options = {"options": kind, **(more or {})} if isinstance(kind, list) else more or {}
    known |= {name: options[name] for name in _MATTERS if name in options}
    if "options" in known:
        known["options"] = [option for option in known["options"] if not str(option).endswith(_FILES)]
    return known


def test_interfaces_are_what_saved_workflows_know(server: GraphServer):
    nodes = {name: interface(info) for name, info in server.get("/object_info").items() if name.startswith("MixGRPO_")}
    nodes = dict(sorted(nodes.items()))
    if os.environ.get("MIXGRPO_UPDATE"):
        FROZEN.write_text(json.dumps(nodes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    changed = [name for name in sorted({*nodes, *frozen}) if nodes.get(name) != frozen.get(name)]
    assert not changed, (
        f"the interface of {', '.join(changed)} is not the frozen one. Saved workflows keep a node's values by their position: "
        "append new inputs at the end, optional and with a default that changes nothing, and never rename, move or take away one "
        f"that was released. If that is so, freeze it anew with: {UPDATE}\n" + "\n".join(_differences(nodes, frozen, changed))
    )


def test_socket_types_are_upper_case(server: GraphServer):
    """comfy-cli takes a type with a lower-case letter for a widget, and every later value shifts."""
    for name, info in server.get("/object_info").items():
        if name.startswith("MixGRPO_"):
            kinds = [entry["type"] for part in interface(info).values() for entry in part]
            assert all(kind.isupper() for kind in kinds), f"{name}: {kinds}"


def test_seeds_say_whether_they_change_by_themselves(server: GraphServer):
    """Unless told otherwise, ComfyUI's page gives an INT called seed a second widget, which sets another seed after every run."""
    for name, info in server.get("/object_info").items():
        seeds = [entry for entry in interface(info)["inputs"] if entry["name"] in ("seed", "noise_seed")]
        assert not name.startswith("MixGRPO_") or all("control_after_generate" in entry for entry in seeds), name


def _differences(nodes: dict[str, Any], frozen: dict[str, Any], changed: list[str]) -> list[str]:
    """One line for every input or output that is new, gone, or another."""
    lines = []
    for name in changed:
        for part in ("inputs", "outputs"):
            was, now = (side.get(name, {}).get(part, []) for side in (frozen, nodes))
            lines += [f"{name}: was {entry}" for entry in was if entry not in now]
            lines += [f"{name}: now {entry}" for entry in now if entry not in was]
            if [entry["name"] for entry in was] != [entry["name"] for entry in now]:
                lines.append(f"{name}: {part} in order were {[e['name'] for e in was]}, are {[e['name'] for e in now]}")
    return lines
