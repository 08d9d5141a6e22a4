"""Rules of the house that a reviewer would otherwise have to remember (docs/design.md)."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import relibra
from relibra.rl.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "relibra"
FILES = sorted(SOURCE.rglob("*.py"))
DESIGN = (ROOT / "docs" / "design.md").read_text()

ABOVE = {
    "cli": {
        "reporting",
        "engine",
        "rl",
        "serving",
        "simulation",
        "calibration",
        "parallel",
        "replay",
        "planning",
        "cluster",
        "routing",
        "timeline",
    },
    "reporting": {"simulation", "planning", "cluster", "routing", "timeline"},
    "rl": {"engine", "calibration", "simulation", "parallel", "replay", "planning", "cluster", "routing", "timeline"},
    "integrations": {
        "eplb",
        "engine",
        "rl",
        "simulation",
        "parallel",
        "replay",
        "planning",
        "cluster",
        "routing",
        "timeline",
    },
    "serving": {"engine", "rl", "parallel", "replay", "planning", "cluster", "routing", "timeline"},
    "engine": {"replay"},
    "calibration": {"planning", "cluster", "routing"},
    "eplb": {"planning", "cluster", "routing"},
    "simulation": {"planning", "cluster", "routing", "timeline"},
    "parallel": {"replay", "planning", "cluster", "routing", "timeline"},
    "replay": {"planning", "cluster", "routing"},
    "planning": {"cluster", "routing"},
    "cluster": {"routing"},
    "routing": set(),
    "timeline": set(),
}
"""Who may import whom; the modules of GROUND stand under everything."""

GROUND = {
    "errors",
    "field_checks",
    "files",
    "environment",
    "number_ranges",
    "printable",
    "user_function",
    "__version__",
}
LIGHT = ("routing", "cluster", "planning", "simulation", "reporting", "timeline")
HEAVY = {"torch", "transformers", "accelerate", "tensorboard", "trl", "vllm", "ray", "fastapi", "uvicorn"}


def _imports(file):
    """Yield every module a file imports, at any depth, as a dotted name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _package(file):
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_import_arrows_point_down(file):
    own = _package(file)
    if own in {"__init__", "__main__"} | GROUND:
        return
    for module in _imports(file):
        parts = module.split(".")
        if parts[0] != "relibra" or len(parts) == 1:
            continue
        assert parts[1] in ABOVE[own] | GROUND | {own}, f"{file} may not import {module}"


def test_picture_of_the_packages_shows_the_imports():
    """Each arrow of the README is an import, and each import between packages follows from arrows."""
    picture = (ROOT / "README.md").read_text().split("```mermaid")[1].split("```")[0]
    drawn = {
        (above, below)
        for line in re.findall(r"^ +\w+ --> .*$", picture, flags=re.MULTILINE)
        for above, below in itertools.product([line.split()[0]], line.split(" --> ")[1].split(" & "))
    }
    arrows = {name: {below for above, below in drawn if above == name} for name in ABOVE}
    imports = {name: set() for name in ABOVE}
    for file in FILES:
        parts = [module.split(".") for module in _imports(file)]
        targets = {names[1] for names in parts if names[0] == "relibra" and len(names) > 1} & ABOVE.keys()
        imports.setdefault(_package(file), set()).update(targets - {_package(file)})
    for name in ABOVE:
        assert arrows[name] <= imports[name], f"the README draws arrows that are no import of {name}"
        assert imports[name] <= _reached(name, arrows), f"the README lacks an arrow of {name}"


def _module(file):
    """Return the dotted name of a source file; a package's is that of its __init__.py."""
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def import_circles():
    """Return every set of modules that import one another, whether for types only, inside a function or at the top."""
    modules = {_module(file): file for file in FILES}
    imported = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported[name] |= {alias.name for alias in node.names if alias.name in modules}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imported[name] |= {full if full in modules else node.module} & modules.keys()
    # Importing a module runs the __init__.py of its packages first.
    imported = {
        name: {one for target in targets for one in _with_packages(target, name)} & modules.keys()
        for name, targets in imported.items()
    }
    reached = {name: _reached(name, imported) for name in modules}
    circles = {frozenset(one for one in reached[name] if name in reached[one]) for name in modules}
    return sorted(sorted(circle) for circle in circles if circle)


def _with_packages(target, name):
    """Return a module and its packages that a module outside of them imports with it."""
    parts = target.split(".")
    packages = {".".join(parts[:end]) for end in range(1, len(parts))}
    return {target} | {package for package in packages if not f"{name}.".startswith(f"{package}.")}


def _reached(start, imported):
    """Return the modules that one imports, directly or through others."""
    seen, left = set(), [start]
    while left:
        for name in imported[left.pop()] - seen:
            seen.add(name)
            left.append(name)
    return seen


def test_no_modules_import_one_another():
    circles = import_circles()
    assert not circles, "modules that import one another:\n" + "\n".join(" <-> ".join(one) for one in circles)


def private_names():
    """Return the names of relibra beginning with _ that tests, benchmarks and examples use, as "file name"."""
    found = set()
    for file in (
        file for folder in ("tests", "benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))
    ):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        aliases = [
            (alias.asname or alias.name, alias.name)
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).split(".")[0] == "relibra"
        ]
        used = {full.split(".")[-1] for _, full in aliases}
        modules = {name for name, _ in aliases}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                used.add(node.attr)
        found |= {f"{file.relative_to(ROOT)} {name}" for name in used if _is_private(name)}
    return found


def _is_private(name):
    return name.startswith("_") and not name.endswith("__")


def test_tests_and_benchmarks_use_public_names():
    assert not private_names()


@pytest.mark.parametrize(
    "file", [file for file in FILES if _package(file) in LIGHT], ids=lambda f: str(f.relative_to(SOURCE))
)
def test_light_packages_name_nothing_heavy(file):
    heavy = {module for module in _imports(file) if module.split(".")[0] in HEAVY}
    assert not heavy, f"{file} imports {heavy}"


def test_light_packages_load_nothing_heavy():
    modules = [
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
        for file in FILES
        if _package(file) in (*LIGHT, "cli") and file.name != "__main__.py"
    ]
    program = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nprint(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


def test_importing_relibra_takes_under_200_ms():
    program = "import time; start = time.perf_counter(); import relibra; print(time.perf_counter() - start)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(seconds) < 0.2


def test_public_names_are_frozen():
    """A name that goes from this list breaks somebody's program: say so in CHANGELOG.md."""
    assert sorted(relibra.__all__) == [
        "BatchRoutes",
        "Budget",
        "Cluster",
        "ClusterError",
        "ConfigError",
        "Demand",
        "EngineError",
        "ExpertShape",
        "Homes",
        "Placement",
        "PlanError",
        "RelibraError",
        "RoutingTrace",
        "ScheduledDemand",
        "StepPlan",
        "TraceError",
        "__version__",
        "cluster_preset",
        "demo_demand",
        "execute_plan",
        "expert_shape",
        "explain_plan",
        "iterate_trace",
        "plan_step",
        "read_plan",
        "read_trace",
        "record_routing",
        "relocate",
        "replay_routing",
        "simulate_step",
        "validate_plan",
        "write_plan",
        "write_trace",
    ]
    for name in relibra.__all__:
        assert getattr(relibra, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        relibra.nonsense  # noqa: B018


def test_type_checkers_see_what_loads_on_first_use():
    block = next(node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    told = {alias.asname for node in block.body for alias in node.names}
    assert told | {"__version__"} == set(relibra.__all__)


def test_a_name_that_needs_a_missing_package_says_how_to_install_it():
    program = (
        "import sys; sys.modules['torch'] = None; import relibra; relibra.plan_step; relibra.simulate_step\n"
        "for name in ('replay_routing', 'execute_plan', 'relocate', 'BatchRoutes'):\n"
        "    try: getattr(relibra, name)\n"
        "    except ModuleNotFoundError as error: print(error.name, str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line, name in zip(lines, ("replay_routing", "execute_plan", "relocate", "BatchRoutes"), strict=True):
        assert line.startswith(f"torch relibra.{name} needs the package 'torch'")
        assert "pip install -e '.[train]'" in line


def test_packages_that_need_torch_say_how_to_install_it():
    program = (
        "import importlib, sys; sys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(error.name, str(error))\n"
    )
    needing = {
        "relibra.replay": "relibra.replay",
        "relibra.replay.batch": "relibra.replay",
        "relibra.parallel": "relibra.parallel",
        "relibra.parallel.rows.dispatch": "relibra.parallel",
        "relibra.rl.algorithms.terms": "relibra.rl.algorithms",
        "relibra.rl.update.credit": "relibra.rl.update",
    }
    done = subprocess.run([sys.executable, "-c", program, *needing], capture_output=True, text=True, check=True)
    for line, package in zip(done.stdout.splitlines(), needing.values(), strict=True):
        assert line.startswith(f"torch {package} needs the package 'torch', which is not installed: install torch")
        assert line.endswith("pip install -e '.[train]'")


def test_no_hint_names_a_package_that_no_index_has():
    files = [*FILES, ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [str(file) for file in files if re.search(r"relibra\[[a-z,]+\]", file.read_text())] == []


def test_public_names_of_replay_are_frozen():
    import relibra.replay

    expected = {"BatchRoutes", "RouterSite", "RoutingRecorder", "RoutingReplay", "find_routers", "record_routing"}
    assert set(relibra.replay.__all__) == expected | {"replay_routing"}


def test_public_names_of_parallel_are_frozen():
    import relibra.parallel

    classes = {"BalancedEP", "LiveBalancing", "LiveSkew", "PlanExecution", "Relocation"}
    functions = {"balance_live", "execute_plan", "logical_order", "logical_parameters", "register", "relocate"}
    assert set(relibra.parallel.__all__) == classes | functions
    for name in relibra.parallel.__all__:
        assert name in relibra.parallel.__doc__ or name in classes, f"{name} is explained nowhere"


def test_public_names_of_simulation_are_frozen():
    import relibra.simulation

    classes = {"Engines", "Execution", "LengthDistribution", "MemoryUse", "ModelShape", "ParallelLayout", "RlIteration"}
    classes |= {"SimulatedRollout", "SimulatedStep", "Speedup", "TimelineDifference", "MODEL_SHAPES", "StepLimit"}
    of_a_step = {"diff_timelines", "memory_use", "overlap_ratio", "simulate_groups", "simulate_step"}
    of_a_step |= {"memory_for_slots", "step_limits", "with_mini_batches"}
    of_a_model = {"counted_model_shape", "cut_model", "model_shape", "model_shape_from_config", "simulated_timeline"}
    of_an_iteration = {"rl_iteration", "simulate_rollout", "simulate_windowed_rollout", "speedup"}
    of_an_iteration |= {"end_to_end_speedup", "needed_stage_speedup"}
    assert set(relibra.simulation.__all__) == classes | of_a_step | of_a_model | of_an_iteration


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_one_module_reads_the_environment_and_nobody_pickles(file):
    text = file.read_text()
    if file.name != "environment.py":
        assert not re.search(r"os\.environ|os\.getenv|\bgetenv\(", text), f"{file} reads the environment"
    assert not {"pickle", "dill", "cloudpickle", "shelve"} & {module.split(".")[0] for module in _imports(file)}
    assert "allow_pickle=True" not in text
    assert "torch.save" not in text


LINE_CEILINGS = {
    "src/relibra": (61_000, ""),
    "planning without deployment and baselines": (7_500, r"planning/(?!deployment/|baselines/)"),
    "planning/baselines": (1_300, "planning/baselines/"),
    "parallel": (4_700, "parallel/"),
}
"""Most lines of Python and templates, and the start of the paths of the files that count."""
MOST_SETTINGS = 90


@pytest.mark.parametrize("name", LINE_CEILINGS)
def test_packages_stay_below_their_ceiling_of_lines(name):
    most, start = LINE_CEILINGS[name]
    files = [*FILES, *SOURCE.rglob("*.html")]
    files = [file for file in files if re.match(start, str(file.relative_to(SOURCE)))]
    lines = {str(file.relative_to(SOURCE)): file.read_text().count("\n") for file in files}
    total, longest = sum(lines.values()), sorted(lines, key=lambda path: -lines[path])[:10]
    assert 0 < total <= most, f"{name}: {total} lines, at most {most}; longest files: {', '.join(longest)}"


def test_settings_of_a_run_stay_below_their_ceiling():
    settings = {name: len(field.annotation.model_fields) for name, field in RunConfig.model_fields.items()}
    total = sum(settings.values())
    assert 0 < total <= MOST_SETTINGS, f"{total} settings, at most {MOST_SETTINGS}: {settings}"


def test_no_file_is_a_collection_of_helpers():
    assert not {file.stem for file in FILES} & {"utils", "helpers", "common", "misc"}


def _imported(file):
    """Return the files of src/relibra that a file imports, also those behind the names of a package."""
    found = set()
    for module in _imports(file):
        path = SOURCE.parent / Path(*module.split("."))
        found |= {one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()}
        lazy = path.parent / "__init__.py"
        if not path.with_suffix(".py").exists() and not path.is_dir() and lazy.exists():
            behind = re.findall(rf'"{path.name}": "([\w.]+)"', lazy.read_text())
            direct = re.findall(rf"from ([\w.]+) import [^\n]*\b{path.name}\b", lazy.read_text())
            found |= {SOURCE.parent / Path(*one.split(".")).with_suffix(".py") for one in (*behind, *direct)}
    return found


def _calls_in_order(tree, name, seen):
    """Yield the names that a function of a module calls, in the order of lines; calls of its own functions inlined."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = [
        node for node in ast.walk(functions[name]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        if call.func.id in functions and call.func.id not in seen:
            yield from _calls_in_order(tree, call.func.id, {*seen, name})
        else:
            yield call.func.id


def test_picture_of_a_step_follows_the_code():
    """docs/design.md: files exist, each --> is an import, stages stand in the order in which rl/step.py calls them."""
    picture = DESIGN.split("## One RL step")[1].split("```")[1]
    chains = [re.findall(r"[\w/]+\.py", line) for line in picture.splitlines() if re.match(r" +\[\w+\]", line)]
    assert len(chains) == picture.count("[") > 7
    for chain in chains:
        assert all((SOURCE / name).exists() for name in chain), chain
        for name, imported in itertools.pairwise(chain):
            assert SOURCE / imported in _imported(SOURCE / name), f"{name} does not import {imported}"
    step = SOURCE / "rl" / "step.py"
    tree = ast.parse(step.read_text())
    module_of = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    called = [module_of[name] for name in _calls_in_order(tree, "rl_step", set()) if name in module_of]
    called = [f"{module}.homes.relocation" if module == "relibra.parallel" else module for module in called]
    stages = [".".join(("relibra", *Path(chain[0]).with_suffix("").parts)) for chain in chains]
    first = [called.index(stage) for stage in stages]
    assert first == sorted(first), dict(zip(stages, first, strict=True))


LETTERS = re.findall(r"`([A-Z])`", "".join(re.findall(r"^\| `[A-Z]`.*? \|", DESIGN, flags=re.MULTILINE)))
"""Letters of axes that docs/design.md explains."""


def test_letters_have_one_meaning_each():
    assert len(set(LETTERS)) == len(LETTERS) > 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_axes_are_letters_of_the_table(file):
    """Shapes of jaxtyping and the suffixes of array names use only letters that docs/design.md explains."""
    text = file.read_text()
    shapes = re.findall(r"(?:Float|Int|UInt|Bool|Shaped|Integer|Num)\w*\[\w+(?:\.\w+)*, \"([^\"]*)\"\]", text)
    axes = {axis for shape in shapes for axis in re.findall(r"[A-Z]", shape)}
    suffixes = re.findall(r"\b[a-z][a-z0-9_]*_(?:\d?([A-Z]+))\b", text)
    assert axes | set("".join(suffixes)) <= set(LETTERS), f"{file}: a letter is missing in docs/design.md"


def test_tests_end_only_what_they_started():
    for file in (ROOT / "tests").rglob("*.py"):
        if file != Path(__file__):
            assert not re.search(r"pkill|killall|os\.kill\(-1", file.read_text()), file


def test_errors_are_one_tree_and_survive_a_process_border():
    import pickle

    from relibra import errors

    for name in ("TraceError", "PlanError", "ConfigError", "ClusterError", "EngineError"):
        error = getattr(errors, name)("what", where="where", got=1, allowed="allowed", next_step="next")
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, errors.RelibraError)
        assert str(again) == str(error)
        assert (
            vars(again)
            == vars(error)
            == {"what": "what", "where": "where", "got": 1, "allowed": "allowed", "next_step": "next"}
        )
        assert str(getattr(errors, name)("a whole sentence")) == "a whole sentence"
