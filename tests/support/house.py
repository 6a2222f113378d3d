"""The package as a house, read from its source: rooms, floors, imports, lines, words.

``python tests/support/house.py`` counts it, so that two commits can be compared.
"""

import ast
import functools
import re
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "synkro"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({file.parent for file in FILES} - {PACKAGE})

_HERE = r"(?! (call|file|host|machine|module|process|program|rank|session|thread|worker)\b)"
PRONOUN = re.compile(
    rf"(Those|These|That|This{_HERE}|They|Them|Their|Its?|Itself|Such|The same|As|Of|So|Whose)\b"
    r"|(And|Also|Then|Both|Others|Another one|One (for|of (them|these|those)))\b"
    r"|\w+ (it|its|itself|they|them|their|theirs|these|those|that of)\b"
    r"|(\w+ )?(all|some|rows) of (it|them)\b"
    r"|(What|Whether|Where|Why|How|When|Who) (that|such)\b|Which each\b"
    r"|There (is|are) (one|some|none)\b"
    r"|(The|An?) (\w+ )?ones?( that| which| of| among|[.,;:])"
    r"|(The|An?|One|This) ([\w-]+ )?[\w-]+'s( end)?[.,;:]",
    re.IGNORECASE,
)
"""What a docstring that needs its neighbours begins with: a pronoun, or a pointer to another one."""

GLOSSARY = {
    "cluster": "hosts",
    "outpost": "leader",
    "dispatch": "gateway",
    "porter": "tasks of hosts",
    "depot": "tasks of hosts",
    "cargo": "parcel",
    "freight": "parcel",
    "stock": "current bytes of a mirror",
    "shelf": "current bytes of a mirror",
    "orders": "protocol",
    "janitor": "cleanup",
    "deputy": "proxy",
    "crew": "pool",
    "belongings": "objects of a rank",
    "holdings": "variables of a rank",
    "carried": "sent functions",
    "lasting": "open command",
    "land": "wait for all turns",
    "rouse": "wake early",
    "disclaim": "give up",
    "doze": "sleep",
    "loaded": "pickled, or unpickled",
    "packed": "pickled, or a parcel",
    "traffic": "footprint",
    "blind": "a condition",
    "spent": "a condition",
    "fine": "a condition",
    "doubt": "a condition",
    "glance": "a state",
}
"""Words of the package's own, and what the field says in their place."""


def drawn_floors(docstring):
    """Floor by room, as drawn in the docstring of a package; a folder's name ends with a slash."""
    drawing = docstring.partition("::\n\n")[2].partition("\n\n")[0]
    floors, floor = {}, None
    for line in drawing.splitlines():
        number, name = re.match(r" {3}( \d|\d\d|  ) {2}(\w+/?) {2,}\S", line).groups()
        floor = floor if number.isspace() else int(number)
        floors[name] = floor
    return floors


def relative(file):
    return file.relative_to(PACKAGE).as_posix()


def room(name):
    """The room of a module's path, such as ``plan/`` of ``plan/split.py``."""
    head, slash, _ = name.partition("/")
    return head + slash if slash else head.removesuffix(".py")


def part(name):
    """The room inside a room, such as ``calls/`` of ``controller/calls/function.py``."""
    return room(name.partition("/")[2])


def tree(file):
    """Its syntax tree, read anew: many of them are more than garbage collections should look at."""
    return ast.parse(file.read_text())


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@functools.cache
def imports(file):
    """All modules that *file* imports: ``(line, dotted name, whether for type checkers only)``."""
    package = ["synkro", *file.relative_to(PACKAGE).parent.parts]
    nodes = [*ast.walk(tree(file))]
    for_types = {id(inner) for node in nodes if is_for_types(node) for inner in ast.walk(node)}
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            dotted = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:  # a module of a package, or a name in a module
                full = dotted if is_module(dotted) else f"{dotted}.{alias.name}"
                found.append((node.lineno, full, id(node) in for_types))
    return found


def is_module(dotted):
    return not dotted.startswith("synkro") or (ROOT / f"{dotted.replace('.', '/')}.py").exists()


def house_imports(file):
    """The modules of Synkro that *file* imports: ``(line, path below the package, for types)``."""
    for line, dotted, for_types in imports(file):
        if dotted == "synkro" or dotted.startswith("synkro."):
            path = ROOT / dotted.replace(".", "/")
            found = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
            found = found if found.exists() else path.parent / "__init__.py"
            if not found.exists():
                found = path.parent.with_suffix(".py")
            yield line, relative(found), for_types


def graph(*, rooms=False, types=False):
    """What each module, or each room, imports when it runs; with *types*, also for type checkers."""
    found = {}
    for file in FILES:
        targets = {target for _, target, for_types in house_imports(file) if types or not for_types}
        if rooms:
            targets = {room(target) for target in targets} - {room(relative(file))}
        found.setdefault(room(relative(file)) if rooms else relative(file), set()).update(targets)
    return found


def circles(found):
    """The sets of modules of which each imports each other, over others or by itself."""
    reached = {name: below(found, name) for name in found}
    sets = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in found
        if name in reached[name]
    }
    return sorted(map(sorted, sets), key=len, reverse=True)


def below(found, name):
    """All that a module imports, over others, too."""
    seen, left = set(), [*found[name]]
    while left:
        target = left.pop()
        if target not in seen:
            seen.add(target)
            left += found.get(target, ())
    return seen


def lines_of_code(node, text):
    """How many lines of *node* hold code: no comments, no blank lines, no docstrings."""
    docs = {
        line
        for inner in ast.walk(node)
        if isinstance(inner, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(inner) is not None
        for line in range(inner.body[0].lineno, inner.body[0].end_lineno + 1)
    }
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    own = {*lines} if isinstance(node, ast.Module) else {*range(node.lineno, node.end_lineno + 1)}
    return sum(1 for number in own - docs if lines[number] and not lines[number].startswith("#"))


def lines(file):
    return lines_of_code(tree(file), file.read_text())


def needy_docstrings(file):
    """The docstrings of *file* that begin with a pronoun or a pointer: ``(line, first words)``."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if PRONOUN.match(text):
                yield getattr(node, "lineno", 1), text[:40]


def words(file):
    """The words that the names in *file* are made of, and that of its own name, each as often."""
    names = [file.stem]
    for node in ast.walk(tree(file)):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                names.append(name)
    return Counter(
        word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    )


def counts():
    """The figures of the house, as text by title."""
    code = {file: lines(file) for file in FILES}
    many = sorted(
        len({t for _, t, _ in house_imports(file)}) for file in FILES if file.stem != "__init__"
    )
    own = sum(map(words, FILES), Counter())
    left = {word: own[word] for word in GLOSSARY if own[word]}
    needy = [(relative(file), *found) for file in FILES for found in needy_docstrings(file)]
    by_room = Counter()
    for file, count in code.items():
        by_room[room(relative(file))] += count
    floors = drawn_floors(ast.get_docstring(tree(PACKAGE / "__init__.py"), clean=True))
    return {
        "modules": len(FILES),
        "lines of code": sum(code.values()),
        "of them by room": ", ".join(f"{name} {count}" for name, count in by_room.most_common()),
        "rooms": len(floors),
        "floors": 1 + max(floors.values()),
        "circles when it runs": shown(circles(graph())),
        "circles with annotations": shown(circles(graph(types=True))),
        "imports of a module": f"{many[len(many) * 9 // 10]} (p90), {many[-1]} (most)",
        "docstrings that begin with a pronoun": len(needy),
        "words of the glossary": f"{len(left)} in {sum(left.values())} places: {left}"
        if left
        else "none",
    }


def shown(found):
    return (
        "none" if not found else "; ".join(f"{len(each)} modules: {', '.join(each)}" for each in found)
    )


if __name__ == "__main__":
    width = max(map(len, counts()))
    sys.stdout.writelines(chain.from_iterable((f"{k:{width}}  {v}\n",) for k, v in counts().items()))
