"""Rules of the house that a reviewer would otherwise have to remember (docs/design.md): a test lists all offenders."""

import ast
import itertools
import pickle
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import relibra
import relibra.parallel
import relibra.replay
import relibra.simulation
from relibra import errors
from relibra.rl.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "relibra"
FILES = sorted(SOURCE.rglob("*.py"))
TEXTS = {str(file.relative_to(SOURCE)): file.read_text() for file in FILES}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
DESIGN = (ROOT / "docs" / "design.md").read_text()

CORE = {"planning", "cluster", "routing"}
ABOVE = {
    "cli": CORE
    | {"reporting", "engine", "rl", "serving", "simulation", "calibration", "parallel", "replay", "timeline"},
    "reporting": CORE | {"simulation", "timeline"},
    "rl": CORE | {"engine", "calibration", "simulation", "parallel", "replay", "timeline"},
    "integrations": CORE | {"eplb", "engine", "rl", "simulation", "parallel", "replay", "timeline"},
    "serving": CORE | {"engine", "rl", "parallel", "replay", "timeline"},
    "engine": CORE | {"replay"},
    "calibration": CORE,
    "eplb": CORE,
    "simulation": CORE | {"timeline"},
    "parallel": CORE | {"replay", "timeline"},
    "replay": CORE,
    "planning": {"cluster", "routing"},
    "cluster": {"routing"},
    "routing": set(),
    "timeline": set(),
}
"""Who may import whom; the modules of GROUND stand under everything."""
GROUND = {
    "errors", "field_checks", "files", "environment", "number_ranges", "parallel_map", "printable",
    "user_function", "__version__",
}  # fmt: skip
LIGHT = ("routing", "cluster", "planning", "simulation", "reporting", "timeline")
HEAVY = {"torch", "transformers", "accelerate", "tensorboard", "trl", "vllm", "ray", "fastapi", "uvicorn"}


def imported_names(tree):
    """Yield every module that a file imports, at any depth, as a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(name):
    return Path(name).parts[0].removesuffix(".py")


def module_of(name):
    """Return the dotted name of a source file; a package's is that of its __init__.py."""
    return ".".join(("relibra", *Path(name).with_suffix("").parts)).removesuffix(".__init__")


def run_python(program, *arguments):
    """Run a program in a process of its own; return its lines."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_imports_are_absolute_and_point_down():
    wrong = []
    for name, tree in TREES.items():
        own = package_of(name)
        allowed = GROUND | {own} | ABOVE.get(own, set())
        for module in imported_names(tree):
            root, _, rest = module.partition(".")
            inner = rest.partition(".")[0]
            if not root or (root == "relibra" and inner and own in ABOVE and inner not in allowed):
                wrong.append(f"{name} imports {module}")
    assert not wrong
    assert {package_of(name) for name in TREES} <= ABOVE.keys() | GROUND | {"__init__", "__main__"}


def test_picture_of_the_packages_shows_the_imports():
    """Each arrow of the README is an import, and each import between packages follows from arrows."""
    picture = (ROOT / "README.md").read_text().split("```mermaid")[1].split("```")[0]
    arrows = {name: set() for name in ABOVE}
    for above, below in re.findall(r"^ +(\w+) --> (.*)$", picture, flags=re.MULTILINE):
        arrows[above] |= set(below.split(" & "))
    imports = {name: set() for name in ABOVE}
    for name, tree in TREES.items():
        parts = [module.split(".") for module in imported_names(tree)]
        targets = {names[1] for names in parts if names[0] == "relibra" and len(names) > 1} & ABOVE.keys()
        imports.setdefault(package_of(name), set()).update(targets - {package_of(name)})
    drawn_only = {name: arrows[name] - imports[name] for name in ABOVE}
    missing = {name: imports[name] - reached_from(name, arrows) for name in ABOVE}
    assert not any(drawn_only.values()), drawn_only
    assert not any(missing.values()), missing


def import_circles():
    """Return every set of modules that import one another, whether for types only, inside a function or at the top."""
    modules = {module_of(name): tree for name, tree in TREES.items()}
    imported = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported[name] |= {alias.name for alias in node.names if alias.name in modules}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imported[name] |= {full if full in modules else node.module} & modules.keys()
    # Importing a module runs the __init__.py of its packages first.
    imported = {
        name: {one for target in targets for one in with_packages(target, name)} & modules.keys()
        for name, targets in imported.items()
    }
    reached = {name: reached_from(name, imported) for name in modules}
    circles = {frozenset(one for one in reached[name] if name in reached[one]) for name in modules}
    return sorted(sorted(circle) for circle in circles if circle)


def with_packages(target, name):
    """Return a module and its packages that a module outside of them imports with it."""
    parts = target.split(".")
    packages = {".".join(parts[:end]) for end in range(1, len(parts))}
    return {target} | {package for package in packages if not f"{name}.".startswith(f"{package}.")}


def reached_from(start, imported):
    """Return the modules that one imports, directly or through others."""
    seen, left = set(), [start]
    while left:
        for name in imported[left.pop()] - seen:
            seen.add(name)
            left.append(name)
    return seen


def test_no_modules_import_one_another():
    assert not import_circles()


def private_names(file):
    """Return the names of relibra beginning with _ that a file uses."""
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
    return {name for name in used if name.startswith("_") and not name.endswith("__")}


def test_tests_and_benchmarks_use_public_names():
    files = [*TEST_FILES, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert not [f"{file} {name}" for file in files for name in private_names(file)]


def test_light_packages_name_and_load_nothing_heavy():
    light = {name: tree for name, tree in TREES.items() if package_of(name) in LIGHT}
    named = [(name, module) for name, tree in light.items() for module in imported_names(tree)]
    assert not [(name, module) for name, module in named if module.split(".")[0] in HEAVY]
    modules = [module_of(name) for name in TREES if package_of(name) in (*LIGHT, "cli")]
    program = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\nprint(*sys.modules, sep='\\n')"
    assert not HEAVY & set(run_python(program, *modules))


def test_importing_relibra_takes_under_200_ms():
    program = "import time; start = time.perf_counter(); import relibra; print(time.perf_counter() - start)"
    assert min(float(run_python(program)[0]) for _ in range(5)) < 0.2


PUBLIC = {  # a name that goes from here breaks somebody's program: say so in CHANGELOG.md
    relibra: """BatchRoutes Budget Cluster ClusterError ConfigError Demand EngineError ExpertShape Homes Placement
        PlanError RelibraError RoutingTrace SampledTokens SamplerHistory ScheduledDemand StepPlan TraceError __version__
        check_sampler choose_kept_activations cluster_preset demo_demand
        execute_plan expert_shape explain_plan iterate_trace plan_step read_plan read_trace record_routing relocate
        replay_routing sampler_sums simulate_step validate_plan write_plan write_trace""",
    relibra.replay: """BatchRoutes RouterSite RoutingRecorder RoutingReplay find_routers record_routing
        replay_routing""",
    relibra.parallel: """BalancedEP LiveBalancing LiveSkew PlanExecution Relocation balance_live execute_plan
        logical_order logical_parameters register relocate""",
    relibra.simulation: """Engines Execution LengthDistribution MemoryUse ModelShape ParallelLayout
        SimulatedRollout SimulatedStep MODEL_SHAPES StepLimit step_limits
        memory_use overlap_ratio simulate_groups simulate_step memory_for_slots
        with_mini_batches counted_model_shape cut_model model_shape model_shape_from_config
        simulated_timeline simulate_rollout choose_kept_activations""",
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_names_are_frozen(package):
    assert set(package.__all__) == set(PUBLIC[package].split())
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018


def test_functions_of_parallel_are_explained_in_its_docstring():
    assert not [n for n in relibra.parallel.__all__ if n.islower() and n not in relibra.parallel.__doc__]


def test_type_checkers_see_what_loads_on_first_use():
    block = next(node for node in TREES["__init__.py"].body if isinstance(node, ast.If))
    told = {alias.asname for node in block.body for alias in node.names}
    assert told | {"__version__"} == set(relibra.__all__)


def test_names_that_need_torch_say_how_to_install_it():
    lazy = ["replay_routing", "execute_plan", "relocate", "BatchRoutes"]
    needing = {
        "relibra.replay": "relibra.replay",
        "relibra.replay.batch": "relibra.replay",
        "relibra.parallel": "relibra.parallel",
        "relibra.parallel.rows.dispatch": "relibra.parallel",
        "relibra.rl.algorithms.terms": "relibra.rl.algorithms",
        "relibra.rl.update.credit": "relibra.rl.update",
    }
    program = (
        "import importlib, sys; sys.modules['torch'] = None; import relibra; relibra.plan_step; relibra.simulate_step\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name) if '.' in name else getattr(relibra, name)\n"
        "    except ModuleNotFoundError as error: print(error.name, str(error))\n"
    )
    said = run_python(program, *lazy, *needing)
    for line, name in zip(said, [*(f"relibra.{name}" for name in lazy), *needing.values()], strict=True):
        assert line.startswith(f"torch {name} needs the package 'torch'")
        assert line.endswith("pip install -e '.[train]'")


def test_no_hint_names_a_package_that_no_index_has():
    files = [*FILES, ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert not [str(file) for file in files if re.search(r"relibra\[[a-z,]+\]", file.read_text())]


def test_no_requirement_names_an_extra_of_a_package():
    """Extras of others come and go; installers only warn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [one for extra in project["optional-dependencies"].values() for one in extra if "[" in one]


def test_one_module_reads_the_environment():
    reads = [name for name, text in TEXTS.items() if re.search(r"os\.environ|os\.getenv|\bgetenv\(", text)]
    assert {Path(name).name for name in reads} <= {"environment.py"}


def test_nobody_pickles():
    picklers = {"pickle", "dill", "cloudpickle", "shelve"}
    named = [(name, module) for name, tree in TREES.items() for module in imported_names(tree)]
    [(written, _)] = [(name, module) for name, module in named if module.split(".")[0] in picklers]
    assert written == "rl/rollout/served/ipc_handles.py", "which vLLM's own back end asks for"
    assert "pickle.load" not in TEXTS[written]
    assert not [name for name, text in TEXTS.items() if re.search(r"allow_pickle=True|torch\.save", text)]


LINE_CEILINGS = {
    "src/relibra": (67_500, ""),
    "planning without deployment and baselines": (8_300, r"planning/(?!deployment/|baselines/)"),
    "planning/baselines": (1_300, "planning/baselines/"),
    "parallel": (5_300, "parallel/"),
}
"""Most lines of Python and templates, and the start of the paths of the files that count."""
MOST_SETTINGS = 114


@pytest.mark.parametrize("name", LINE_CEILINGS)
def test_packages_stay_below_their_ceiling_of_lines(name):
    most, start = LINE_CEILINGS[name]
    templates = {str(file.relative_to(SOURCE)): file.read_text() for file in SOURCE.rglob("*.html")}
    lines = {path: text.count("\n") for path, text in (TEXTS | templates).items() if re.match(start, path)}
    total, longest = sum(lines.values()), sorted(lines, key=lambda path: -lines[path])[:10]
    assert 0 < total <= most, f"{name}: {total} lines, at most {most}; longest files: {', '.join(longest)}"


def test_settings_of_a_run_stay_below_their_ceiling():
    settings = {name: len(field.annotation.model_fields) for name, field in RunConfig.model_fields.items()}
    total = sum(settings.values())
    assert 0 < total <= MOST_SETTINGS, f"{total} settings, at most {MOST_SETTINGS}: {settings}"


def test_benchmarks_and_examples_name_settings_that_exist():
    sections = {name: set(field.annotation.model_fields) for name, field in RunConfig.model_fields.items()}
    given = re.compile(rf"[\"' ]({'|'.join(sections)})\.([a-z_]+)=[^=]")
    files = [file for folder in ("benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    named = [(file, *found.groups()) for file in files for found in given.finditer(file.read_text())]
    assert len(named) > 50
    assert not [f"{file}: {section}.{key}" for file, section, key in named if key not in sections[section]]


def test_no_file_is_a_collection_of_helpers():
    assert not {file.stem for file in FILES} & {"utils", "helpers", "common", "misc"}


def imported_files(name):
    """Return the files of src/relibra that a file imports, also those behind the names of a package."""
    found = set()
    for module in imported_names(TREES[name]):
        path = SOURCE.parent / Path(*module.split("."))
        found |= {one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()}
        lazy = path.parent / "__init__.py"
        if not path.with_suffix(".py").exists() and not path.is_dir() and lazy.exists():
            behind = re.findall(rf'"{path.name}": "([\w.]+)"', lazy.read_text())
            direct = re.findall(rf"from ([\w.]+) import [^\n]*\b{path.name}\b", lazy.read_text())
            found |= {SOURCE.parent / Path(*one.split(".")).with_suffix(".py") for one in (*behind, *direct)}
    return found


def calls_in_order(tree, name, seen):
    """Yield the names that a function of a module calls, in the order of lines; calls of its own functions inlined."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = [
        node for node in ast.walk(functions[name]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        if call.func.id in functions and call.func.id not in seen:
            yield from calls_in_order(tree, call.func.id, {*seen, name})
        else:
            yield call.func.id


def test_picture_of_a_step_follows_the_code():
    """docs/design.md: files exist, each --> is an import, stages stand in the order in which rl/step.py calls them."""
    picture = DESIGN.split("## One RL step")[1].split("```")[1]
    chains = [re.findall(r"[\w/]+\.py", line) for line in picture.splitlines() if re.match(r" +\[\w+\]", line)]
    assert len(chains) == picture.count("[") > 7
    for chain in chains:
        assert all(name in TREES for name in chain), chain
        for name, imported in itertools.pairwise(chain):
            assert SOURCE / imported in imported_files(name), f"{name} does not import {imported}"
    tree = TREES["rl/step.py"]
    imported_from = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    called = [imported_from[name] for name in calls_in_order(tree, "rl_step", set()) if name in imported_from]
    called = [f"{module}.homes.relocation" if module == "relibra.parallel" else module for module in called]
    stages = [module_of(chain[0]) for chain in chains]
    first = [called.index(stage) for stage in stages]
    assert first == sorted(first), dict(zip(stages, first, strict=True))


@cache
def letters_of_axes():
    """Return the letters of axes that docs/design.md explains."""
    return re.findall(r"`([A-Z])`", "".join(re.findall(r"^\| `[A-Z]`.*? \|", DESIGN, flags=re.MULTILINE)))


def test_letters_of_axes_have_one_meaning_each():
    assert len(set(letters_of_axes())) == len(letters_of_axes()) > 12


def test_axes_are_letters_of_the_table():
    """Shapes of jaxtyping and the suffixes of array names use only letters that docs/design.md explains."""
    wrong = []
    for name, text in TEXTS.items():
        shapes = re.findall(r"(?:Float|Int|UInt|Bool|Shaped|Integer|Num)\w*\[\w+(?:\.\w+)*, \"([^\"]*)\"\]", text)
        axes = {axis for shape in shapes for axis in re.findall(r"[A-Z]", shape)}
        suffixes = re.findall(r"\b[a-z][a-z0-9_]*_(?:\d?([A-Z]+))\b", text)
        unknown = (axes | set("".join(suffixes))) - set(letters_of_axes())
        wrong += [f"{name}: {sorted(unknown)}"] * bool(unknown)
    assert not wrong


def test_tests_end_only_what_they_started():
    texts = {file: file.read_text() for file in TEST_FILES if file != Path(__file__)}
    assert not [str(file) for file, text in texts.items() if re.search(r"pkill|killall|os\.kill\(-1", text)]


def test_names_of_tests_have_at_most_60_characters():
    long = []
    for file in TEST_FILES:
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        names = [node.name for node in functions if node.name.startswith("test_")]
        long += [f"{file.relative_to(ROOT / 'tests')} {name}" for name in names if len(name) > 60]
    assert not long


@pytest.mark.parametrize("name", ["TraceError", "PlanError", "ConfigError", "ClusterError", "EngineError"])
def test_errors_survive_a_process_border(name):
    fields = {"what": "what", "where": "where", "got": 1, "allowed": "allowed", "next_step": "next"}
    error = getattr(errors, name)(fields["what"], **{key: fields[key] for key in fields if key != "what"})
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, errors.RelibraError)
    assert str(again) == str(error)
    assert vars(again) == vars(error) == fields
    assert str(getattr(errors, name)("a whole sentence")) == "a whole sentence"
