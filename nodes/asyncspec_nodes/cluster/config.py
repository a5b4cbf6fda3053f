"""A cluster as one TOML file, the same for every node: the words and the rules that need no model.

Law of this file: what a user wrote wrong is a ``UserError``, one sentence that names the file and
the key. Nothing here opens a checkpoint or a socket.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from asyncspec_nodes.cluster import toml_file
from asyncspec_nodes.cluster.chat_templates import PLAIN
from asyncspec_nodes.cluster.config_rules import check
from asyncspec_nodes.cluster.config_tables import Config
from asyncspec_nodes.cluster.source_names import EAGLE, WITHOUT_MODEL, each


def load(path: Path) -> Config:
    """Read a cluster file, check it, and make its paths absolute."""
    config = toml_file.load(path, "the cluster file", parse)
    return _absolute(config, path.absolute().parent)


def parse(text: str) -> Config:
    """A cluster file's text, checked."""
    config = toml_file.decode(text, Config)
    check(config)
    return config


def _absolute(config: Config, base: Path) -> Config:
    """Paths that exist beside the file win; else a target or draft is a Hugging Face id."""
    replace = msgspec.structs.replace
    security = config.security
    if security is not None:
        keys = {name: str(base / getattr(security, name)) for name in security.__struct_fields__}
        security = replace(security, **keys)
    template = config.target.chat_template
    if template is not None and template != PLAIN:
        template = str(base / Path(template).expanduser())
    target = _beside(base, config.target.path)
    return replace(
        config,
        target=replace(config.target, path=target, chat_template=template),
        draft=replace(config.draft, source=each(config.draft.source, partial(_source, base))),
        security=security,
    )


def _source(base: Path, name: str) -> str:
    if name.startswith(EAGLE):
        return EAGLE + _beside(base, name.removeprefix(EAGLE))
    return name if name in WITHOUT_MODEL else _beside(base, name)


def _beside(base: Path, name: str) -> str:
    path = base / Path(name).expanduser()
    written_as_path = name.startswith((".", "/", "~"))
    return str(path) if written_as_path or path.is_dir() else name


def to_toml(config: Config) -> str:
    """The file that loads as ``config``."""
    tables = msgspec.to_builtins(config)
    nodes, paces = tables.pop("node"), tables.pop("pace")
    parts = [
        toml_file.table(f"[{name}]", table) for name, table in tables.items() if table is not None
    ]
    parts.extend(toml_file.table("[[node]]", node) for node in nodes)
    parts.extend(toml_file.table(f"[pace.{rank}]", pace) for rank, pace in paces.items())
    return "\n".join(parts)
