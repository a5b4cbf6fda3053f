"""What a certificate's holder may be, over TLS; revocation and renewal while links are up."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actor.local_cluster import QUICK, LocalCluster, bound, hello
from asyncspec.actor.link import Certificate, Link, LinkOptions
from asyncspec.actor.mesh import Mesh, Security
from asyncspec.core.errors import UserError
from asyncspec.trace.collector import OPERATORS_ONLY
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import OTHER_AUTHORITY, Keys, role_problem
from asyncspec_nodes.plugins.join import key_folder
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.links import client_hello
from asyncspec_protocol.messages import Events, Role, Welcome
from certificates import make_keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys")
    make_keys(
        path, "any", "draft=node:0", "one=node:1", "two=node:2", "guest=client", "boss=operator"
    )
    return path


def table(folder: Path, name: str) -> SecurityTable:
    files = (folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
    return SecurityTable(*map(str, files))


@pytest.mark.parametrize(
    ("roles", "rank", "problem"),
    [
        ("", 1, "its certificate names no role: make a new one"),
        ("node:1", 1, ""),
        ("node:1", 2, "its certificate is for node:1, not rank 2"),
        ("node:1 node:2", 2, ""),
        ("node", 1001, ""),
        ("node:1", 1001, "not rank 1001"),
        ("stage", 3, ""),
        ("stage", 0, "its certificate is for stage, not rank 0"),
        ("stage", 1001, "not rank 1001"),
        ("stage", -1, "its certificate is for stage, not for a client"),
        ("client", 0, "not rank 0"),
        ("operator", 1, "not rank 1"),
        ("client", -1, ""),
        ("operator", -1, ""),
        ("node:3", -1, ""),
    ],
)
def test_roles(roles: str, rank: int, problem: str) -> None:
    peer = client_hello() if rank < 0 else hello(rank, 3)
    found = role_problem(frozenset(roles.split()), peer)
    assert (problem in found) if problem else not found


class Owner:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def joined(self, link: Link) -> None:
        self.news.put_nowait(("joined", f"{link.rank} {link.operator}"))

    def lost(self, link: Link, reason: str) -> None:
        self.news.put_nowait(("lost", reason))

    def frame(self, link: Link, frame: Frame) -> None:
        """Nobody says anything here."""

    def refused(self, rank: Rank, reason: str) -> None:
        self.news.put_nowait(("refused", reason))


class Pair:
    """A stage, and a draft node that dials it."""

    def __init__(self, stage: Keys, draft: Keys) -> None:
        sock = bound()
        self.reported = Owner(), Owner()
        ports: Any = {Rank(1): sock.getsockname()}
        self.sock = sock
        self.stage = Mesh(hello(1, 1), {}, self.reported[0], QUICK, stage)
        self.draft = Mesh(hello(0, 1), ports, self.reported[1], QUICK, draft)

    async def news(self) -> tuple[str, str]:
        """What the stage learns next."""
        return await asyncio.wait_for(self.reported[0].news.get(), 240)


@asynccontextmanager
async def pair(stage: Keys, draft: Keys) -> AsyncIterator[Pair]:
    both = Pair(stage, draft)
    await both.stage.start(both.sock)
    await both.draft.start(bound())
    try:
        yield both
    finally:
        await both.draft.close("over")
        await both.stage.close("over")


def keys(folder: Path, name: str) -> Keys:
    return Keys(table(folder, name))


@pytest.mark.parametrize(
    ("stage", "draft", "expected"),
    [
        ("one", "draft", ("joined", "0 False")),
        ("any", "any", ("joined", "0 False")),
        ("one", "guest", ("refused", "its certificate is for client, not rank 0")),
        ("one", "two", ("refused", "its certificate is for node:2, not rank 0")),
    ],
)
def test_a_node_is_only_its_own_rank(
    folder: Path, stage: str, draft: str, expected: tuple[str, str]
) -> None:
    async def main() -> None:
        async with pair(keys(folder, stage), keys(folder, draft)) as both:
            assert await both.news() == expected

    asyncio.run(main())


def test_what_is_dialled_must_be_the_rank_that_was_dialled(folder: Path) -> None:
    async def main() -> None:
        async with pair(keys(folder, "guest"), keys(folder, "draft")) as both:
            reported = [await asyncio.wait_for(both.reported[1].news.get(), 240)]
            assert reported == [("refused", "its certificate is for client, not rank 1")]
            assert both.draft.refusals

    asyncio.run(main())


def test_a_revoked_certificate_loses_its_link_and_gets_no_other(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    key_folder.revoke(tmp_path, ["two"])
    stage = Keys(replace(table(tmp_path, "one"), crl=str(tmp_path / "crl.pem")))

    async def main() -> None:
        async with pair(stage, keys(tmp_path, "draft")) as both:
            assert await both.news() == ("joined", "0 False")
            assert not stage.changed()
            key_folder.revoke(tmp_path, ["draft"])
            assert stage.changed()
            stage.reload()
            both.stage.check_certificates()
            assert await both.news() == ("lost", "its certificate is revoked")
            assert await both.news() == ("refused", "its certificate is revoked")

    asyncio.run(main())


def test_certificates_are_renewed_for_new_links(folder: Path, tmp_path: Path) -> None:
    """What does not fit together changes nothing."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shown = keys(tmp_path, "guest")

    async def main() -> None:
        async with pair(keys(tmp_path, "one"), shown) as both:
            assert (await both.news())[0] == "refused"
            shutil.copy(tmp_path / "draft.pem", tmp_path / "guest.pem")
            with pytest.raises(UserError, match="do not fit together"):
                shown.reload()
            shutil.copy(tmp_path / "draft.key", tmp_path / "guest.key")
            shown.reload()
            assert await both.news() == ("joined", "0 False")

    asyncio.run(main())


def test_lists_of_another_authority_revoke_nothing(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path, "box")
    key_folder.revoke(tmp_path, ["box"])
    theirs = replace(table(folder, "one"), crl=str(tmp_path / "crl.pem"))
    with pytest.raises(UserError, match="not signed by the authority"):
        Keys(theirs)
    with pytest.raises(UserError, match="is no revocation list"):
        Keys(replace(theirs, crl=str(folder / "ca.pem")))
    with pytest.raises(UserError, match="there is no file"):
        Keys(replace(theirs, crl=str(folder / "none.pem")))


def roll(folder: Path, source: Path, name: str) -> None:
    """The certificate and key of ``name`` from another authority's folder."""
    for kind in ("pem", "key"):
        shutil.copy(source / f"{name}.{kind}", folder)


def test_an_authority_that_is_replaced_is_trusted_no_more(folder: Path, tmp_path: Path) -> None:
    """Both are meanwhile, while ``ca`` has both."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(folder, old)
    make_keys(new, "draft=node:0", "one=node:1")
    earlier, authority = (old / "ca.pem").read_bytes(), (new / "ca.pem").read_bytes()
    bundle = tmp_path / "both.pem"
    bundle.write_bytes(authority + earlier)
    stage = keys(old, "one")
    draft = Keys(replace(table(folder, "draft"), ca=str(bundle)))

    async def main() -> None:
        async with pair(stage, draft) as both:
            assert await both.news() == ("joined", "0 False")
            shutil.copy(bundle, old / "ca.pem")
            stage.reload()
            both.stage.check_certificates()
            assert both.stage.links
            roll(old, new, "one")
            (old / "ca.pem").write_bytes(authority)
            stage.reload()
            both.stage.check_certificates()
            assert await both.news() == ("lost", OTHER_AUTHORITY)
            assert await both.news() == ("refused", OTHER_AUTHORITY)

    asyncio.run(main())


@pytest.mark.parametrize("of", ["old", "new"])
def test_a_bundle_of_authorities_accepts_members_of_each(
    folder: Path, tmp_path: Path, of: str
) -> None:
    new = tmp_path / "new"
    make_keys(new, "draft=node:0", "one=node:1")
    key_folder.revoke(new, ["one"])
    bundle = tmp_path / "both.pem"
    bundle.write_bytes(b"".join((one / "ca.pem").read_bytes() for one in (folder, new)))
    # A list of either authority revokes.
    ours = replace(table(folder, "one"), ca=str(bundle), crl=str(new / "crl.pem"))
    theirs = replace(table(folder if of == "old" else new, "draft"), ca=str(bundle))

    async def main() -> None:
        async with pair(Keys(ours), Keys(theirs)) as both:
            assert await both.news() == ("joined", "0 False")

    asyncio.run(main())


def test_a_node_dials_none_of_an_authority_that_is_replaced(folder: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(folder, old)
    make_keys(new, "draft=node:0", "one=node:1")
    shown = keys(old, "draft")
    (old / "ca.pem").write_bytes((new / "ca.pem").read_bytes())
    shown.reload()

    async def main() -> None:
        async with pair(keys(folder, "one"), shown) as both:
            reported = await asyncio.wait_for(both.reported[1].news.get(), 240)
            assert reported == ("refused", OTHER_AUTHORITY)

    asyncio.run(main())


class Guests(Security):
    """Whoever comes is no operator."""

    def operator(self, certificate: Certificate | None) -> bool:
        return False


def test_only_operators_record() -> None:
    async def main() -> None:
        async with LocalCluster(1, traced=False) as cluster:
            await asyncio.sleep(0)
            cluster.nodes[0]._mesh._security = Guests()
            client = await Client.connect(*cluster.ports[Rank(0)], "toy", options=QUICK)
            reported: asyncio.Queue[Events] = asyncio.Queue()
            client.collect(-1, lambda events, data: reported.put_nowait(events), tokens=True)
            events = await asyncio.wait_for(reported.get(), 240)
            assert (events.done, events.reason) == (True, OPERATORS_ONLY)
            assert cluster.collectors[0].recorder is None
            await client.close()

    asyncio.run(main())


async def pose(folder: Path, welcome: Welcome) -> str:
    """What the boss is told of a guest that answers it so."""

    def said(link: Link, frame: Frame) -> None:
        link.send(welcome)

    loop, options = asyncio.get_running_loop(), LinkOptions()
    server = await loop.create_server(
        lambda: Link(options, said, lambda link, reason: None),
        "127.0.0.1",
        ssl=Keys(table(folder, "guest")).server,
    )
    async with server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(UserError) as raised:
            await Client.connect(host, port, "toy", security=Keys(table(folder, "boss")))
    return str(raised.value).partition(" is refused: ")[2]


@pytest.mark.parametrize("role", ["client", "verify", "source", "draft"])
@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_no_client_poses_as_the_draft_node(folder: Path, role: Role, rank: int) -> None:
    """A client's certificate fits one that calls itself a client; it serves nobody's requests."""
    facts = {name: getattr(hello(0, 1), name) for name in Welcome.__struct_fields__}
    said = asyncio.run(pose(folder, Welcome(**{**facts, "role": role, "rank": Rank(rank)})))
    if role == "draft" and rank == 0:
        assert said == "its certificate is for client, not rank 0"
    else:
        assert said == f"it calls itself a {role}, not a draft node; correct the address"
