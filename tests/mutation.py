"""How good are the tests? Breaks a file on purpose, in every way that cosmic-ray knows, and counts who notices.

    pip install cosmic-ray
    python tests/mutation.py averaging            # or placement, towers, mnist; seconds per mutant
    python tests/mutation.py towers 0/2           # the first of two parts of the mutants

TensorFlow is imported once; each mutant is tried in a forked process, by the tests of its file, until one of them
fails. Of all replacements for one operator, three are tried. Prints each survivor, and the score.
"""

import collections
import contextlib
import difflib
import os
import shutil
import signal
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SECONDS = 900  # longer is a hang, and that is noticed too


def mutants(source):
    """Yields (operator, mutated source)."""
    from cosmic_ray.plugins import get_operator, operator_names

    families = collections.Counter()
    for name in sorted(operator_names()):
        parts = name.split("/")[1].split("_")
        family = "_".join(parts[:2]) if parts[0].startswith("Replace") else name
        families[family] += 1
        if families[family] > 3:
            continue
        try:
            operator = get_operator(name)()
        except TypeError:  # one that must be told what to look for
            continue
        for occurrence in range(1000):
            try:
                mutated = mutate(source, operator, occurrence)
            except AttributeError:  # cosmic-ray cannot replace one of several exceptions
                continue
            if mutated is None:
                break
            yield name, mutated


def mutate(source, operator, occurrence):
    from cosmic_ray.mutating import mutate_code

    return mutate_code(source, operator, occurrence)


def survives(module, mutated):
    """Runs the tests of the module in a fork, in a copy of the tree that holds the mutant."""
    child = os.fork()
    if child == 0:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(BaseException):
            for name in os.listdir(ROOT):
                if name.endswith(".py") or name == "pyproject.toml":
                    shutil.copy(os.path.join(ROOT, name), folder)
            shutil.copytree(os.path.join(ROOT, "tests"), os.path.join(folder, "tests"))
            os.symlink(os.path.join(ROOT, "data"), os.path.join(folder, "data"))
            with open(os.path.join(folder, module + ".py"), "w") as file:
                file.write(mutated)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            os.chdir(folder)
            sys.path.insert(0, folder)
            code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", os.path.join("tests", f"test_{module}.py")])
            shutil.rmtree(folder)
            os._exit(0 if code == 0 else 1)
        os._exit(1)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main(module, part="0/1"):
    part, parts = map(int, part.split("/"))
    with open(os.path.join(ROOT, module + ".py")) as file:
        source = file.read()
    assert survives(module, source), "the tests fail on the file as it is"
    killed, survivors, seen = 0, 0, {source}
    for name, mutated in mutants(source):
        if mutated in seen:
            continue
        seen.add(mutated)
        if len(seen) % parts != part:
            continue
        with contextlib.suppress(SyntaxError):
            compile(mutated, module, "exec")
            if survives(module, mutated):
                survivors += 1
                lines = difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0, lineterm="")
                print(
                    f"survived {name}",
                    *[line for line in lines if line[:2] not in ("--", "++", "@@")],
                    sep="\n  ",
                    flush=True,
                )
            else:
                killed += 1
    print(f"{module}: {killed} of {killed + survivors} mutants killed", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import hypothesis  # noqa: F401
    import keras  # noqa: F401
    import pytest
    import tensorflow  # noqa: F401

    main(*sys.argv[1:])
