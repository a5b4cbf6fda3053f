"""``nox -s newest`` and ``nox -s oldest``: the wheel in a new environment with other versions of
what it needs (CONTRIBUTING.md, "Requirements"). Words after ``--`` are further constraints, such as
``transformers==5.14``; ``torch==any`` leaves torch to pip. ``nox -s speculators``: that library.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXTRA = "hf"
TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
# What depends on transformers' and onnxruntime's code, of all model families.
TESTS = (
    "tests/backend/test_other_release.py",
    "tests/backend/test_optimized_layers.py",
    "tests/backend/test_mlas.py",
    "tests/backend/test_families.py::test_same_tokens_as_generate",
)
SHOWN = ("torch", "transformers", "onnxruntime", "numpy", "msgspec", "aiohttp")

nox.options.default_venv_backend = "venv"
nox.options.sessions = ("oldest", "newest")


@nox.session
def oldest(session: nox.Session) -> None:
    """Every lower bound of pyproject.toml."""
    _check(session, list(_lower_bounds()))


@nox.session
def newest(session: nox.Session) -> None:
    """What pip gives to users today."""
    _check(session, [])


@nox.session
def speculators(session: nox.Session) -> None:
    """Whether speculators' own class reads a trained head. By name only: what it imports takes 270
    MB without torch, torchvision and torchaudio, which it would have pip install."""
    _link_torch(session, _pinned("torch"))
    tools = [line for line in _extra("dev") if Requirement(line).name in TEST_TOOLS]
    imported = ("datasets", "loguru", "openai", "pydantic-settings")
    session.install("--no-compile", f".[{EXTRA}]", *tools, *imported)
    session.install("--no-compile", "--no-deps", "speculators", "hs-connectors")
    session.run("python", "-c", "import speculators")  # the test skips itself without it
    session.run("pytest", "-q", "tests/backend/test_training.py", "-k", "speculators_own")


def _check(session: nox.Session, lines: list[str]) -> None:
    """Install the wheel, decode a prompt with the bundled models and run a part of the tests, which
    are the checkout's."""
    folder = Path(session.create_tmp()).resolve()
    torch = _pinned("torch")
    first = {Requirement(line).name: line for line in (f"torch=={torch}", *session.posargs)}
    if first["torch"] == "torch==any":
        del first["torch"]
    elif first["torch"] == f"torch=={torch}":
        _link_torch(session, torch)
    kept = [line for line in lines if Requirement(line).name not in first]
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in (*first.values(), *kept)))
    session.run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir",
                str(folder), ".", external=True)  # fmt: skip
    wheel = max(folder.glob("asyncspec-*.whl"))
    tools = [line for line in _extra("dev") if Requirement(line).name in TEST_TOOLS]
    # Python compiles what is imported; all of it takes longer than the rest of this.
    session.install("--no-compile", "-c", str(constraints), f"{wheel}[{EXTRA}]", *tools)
    session.run("python", "-c", f"import importlib.metadata as m; "
                f"print(*(n + ' ' + m.version(n) for n in {SHOWN}), sep=', ')")  # fmt: skip
    root = Path.cwd()
    session.chdir(folder)  # the command sees nothing of the checkout
    outside = {"PYTHONPATH": None}
    prompt = ("--max-new-tokens", "32", "--prompt", "Once upon a time")
    session.run("asyncspec", "run", "--check", *prompt, env=outside)
    ours = ("-c", str(root / "pyproject.toml"), "-o", f"pythonpath={root / 'tests'}")
    quiet = ("-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal")
    session.run("pytest", *ours, *quiet, *(str(root / test) for test in TESTS), env=outside)


def _extra(name: str) -> list[str]:
    lines: list[str] = PROJECT["optional-dependencies"][name]
    return lines


def _lower_bounds() -> Iterator[str]:
    """Of this platform's requirements."""
    for line in PROJECT["dependencies"] + _extra(EXTRA):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            (bound,) = (each.version for each in requirement.specifier if each.operator == ">=")
            yield f"{requirement.name}=={bound}"


def _pinned(name: str) -> str:
    """The version that constraints.txt has of a package."""
    lines = Path("constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))


def _link_torch(session: nox.Session, version: str) -> None:
    """Link the running Python's torch into the session where it has that version: an installation
    takes minutes and gigabytes."""
    running = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = Path(session.virtualenv.location) / "lib" / running / "site-packages"
    found = distribution("torch")
    if not packages.is_dir() or Version(found.version).public != Version(version).public:
        return
    for name in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
        link = packages / name
        if not link.exists():
            link.symlink_to(Path(str(found.locate_file(name))))
