"""Values as people write them on a command line or in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["UsageError", "assignment", "read_file", "scalar", "split_outside_brackets"]


class UsageError(Exception):
    """What the user gave cannot be used; the text is the whole message."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}\n  what to do: {remedy}" if remedy else what)


def read_file(path: Path) -> Any:
    """What a JSON or YAML file holds.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"{path} cannot be read: {reason}", "name a JSON or YAML file"
        ) from error
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f" in line {mark.line + 1}" if mark else ""
            reason = getattr(error, "problem", None) or str(error)
            raise UsageError(f"{path} is not YAML{place}: {reason}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not YAML: {error}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not JSON: {error}", "name the file .yaml if it is YAML"
        ) from error


def split_outside_brackets(text: str) -> list[str]:
    """Parts between the commas that stand outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def scalar(text: str) -> Any:
    """A value as people write it: a number, a bool, a list, or text."""
    text = text.strip()
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if text.startswith("[") and text.endswith("]"):
        return [scalar(p) for p in split_outside_brackets(text[1:-1]) if p]
    known = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


def assignment(text: str, option: str) -> tuple[str, Any]:
    """``key=value`` as a key and a value."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{option} {text!r} is no assignment", "write key=value")
    return key.strip(), scalar(value)
