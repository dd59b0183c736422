"""What the site has of its own: reference pages from docstrings, commands from typer, pictures.

```{public} fsdpcore.optim      every name that follows, from its docstring
Adam AdamW
```
```{command} run                usage and options of a subcommand of ``fsdpcore``
```
```{diagram} collective         docs/diagrams/collective.txt as SVG, in the page's colours
```
```{settings}                   the settings of a job, from the class that holds them
```
```{url-options} MODULE.CLASS   the options in the URL of a transport
```
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import types
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from docutils import nodes
from docutils.parsers.rst import Directive
from drawing import draw, read
from numpy.typing import ArrayLike, DTypeLike, NDArray
from sphinx.addnodes import pending_xref
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import stringify_annotation

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DIAGRAMS = Path(__file__).parents[1] / "diagrams"


def find(name: str) -> Any:
    """Return the object of a dotted name, reached as a user reaches it."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for each in rest:
        found = getattr(found, each)
    return found


def members(cls: type) -> list[str]:
    """Return the public methods and properties of a class that are ours, inherited ones too."""
    found = []
    for name in dir(cls):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(cls, name)
        inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
        words = inspect.getdoc(inner) or ""
        ours = str(getattr(inner, "__module__", "")).startswith("fsdpcore")
        if inspect.isroutine(inner) and ours and not _told_above(cls, name, words):
            found.append(name)
    return found


def _told_above(cls: type, name: str, words: str) -> bool:
    """Whether a public base class has this member with the same words, or is referred to."""
    import fsdpcore

    places = (fsdpcore, fsdpcore.optim, fsdpcore.initializers, fsdpcore.optim.schedules)
    public = [getattr(place, each) for place in places for each in place.__all__]
    bases = [base for base in cls.__mro__[1:] if base in public and hasattr(base, name)]
    told = {inspect.getdoc(getattr(base, name)) for base in bases}
    return bool(bases) and (words in told or words.startswith("See "))


def directive_for(name: str) -> list[str]:
    """Return lines of reStructuredText that document a public name."""
    found = find(name)
    if isinstance(found, types.ModuleType):
        raise ValueError(f"{name} is a module: name what it shows")
    if isinstance(found, type) and issubclass(found, BaseException):
        return [f".. autoexception:: {name}", "   :no-members:", ""]
    if isinstance(found, type):
        own = members(found)
        lines = [f".. autoclass:: {name}"]
        lines += [f"   :members: {', '.join(own)}"] if own else ["   :no-members:"]
        return [*lines, ""]
    if callable(found):
        return [f".. autofunction:: {name}", ""]
    return [f".. autodata:: {name}", "   :no-value:", ""]


class _Generated(SphinxDirective, ABC):
    """Puts generated reStructuredText into a page."""

    has_content = True

    @abstractmethod
    def lines(self) -> list[str]:
        """What is generated."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(["````{eval-rst}", *self.lines(), "````"]))


class Public(_Generated):
    """Names of a module, each from its docstring."""

    required_arguments = 1

    def lines(self) -> list[str]:
        names = " ".join(self.content).split()
        return [line for name in names for line in directive_for(f"{self.arguments[0]}.{name}")]


def _plain(text: str | None) -> str:
    """Return words as reStructuredText, in which options and quoted commands are code."""
    words = " ".join((text or "").split()).replace("*", r"\*").replace("_", r"\_")
    words = re.sub(r"'([^']* -[^']*)'", lambda found: f"``{_bare(found[1])}``", words)
    return re.sub(r"(?<![\w`-])(--[a-z][-\w]*)(?![^`]*`` )", r"``\1``", words)


def _bare(text: str) -> str:
    return text.replace("\\", "")


def command_named(name: str) -> Any:
    """Return the click command of a subcommand, such as ``ckpt inspect``."""
    from fsdpcore.commands.main import app

    found: Any = typer.main.get_command(app)
    for word in name.split():
        found = found.get_command(typer.Context(found), word)
        if found is None:
            raise ValueError(f"fsdpcore has no command {name!r}")
    return found


class Command(_Generated):
    """Usage, words and options of a subcommand."""

    required_arguments = 1
    final_argument_whitespace = True

    def lines(self) -> list[str]:
        command = command_named(self.arguments[0])
        context = typer.Context(command, info_name=f"fsdpcore {self.arguments[0]}")
        usage = " ".join(["fsdpcore", self.arguments[0], *command.collect_usage_pieces(context)])
        lines = [".. code-block:: text", "", f"   {usage}", ""]
        for paragraph in inspect.cleandoc(command.help or "").replace("\b", "").split("\n\n"):
            lines += ["".join(f"| {line}\n" for line in paragraph.split("\n")) if "  " in paragraph
                      else _plain(paragraph), ""]  # fmt: skip
        rows = []
        for option in command.params:
            record = option.get_help_record(context)
            if record:
                rows += [f"``{record[0]}``", f"   {_plain(record[1]) or 'see above'}", ""]
        return [line for text in [*lines, *rows] for line in text.split("\n")]


class Settings(_Generated):
    """The settings of a job: argument, variable, default."""

    def lines(self) -> list[str]:
        from fsdpcore.comm.config import Settings as Fields

        lines = [".. list-table::", "   :header-rows: 1", ""]
        lines += ["   * - argument, key of the file", "     - variable", "     - default"]
        for field in dataclasses.fields(Fields):
            lines += [
                f"   * - ``{field.name}``",
                f"     - ``FSDPCORE_{field.name.upper()}``",
                f"     - ``{_default(field)!r}``",
            ]
        return [*lines, "", *_attributes(Fields)]


def _attributes(cls: type) -> list[str]:
    """Return the section ``Attributes`` of a class's docstring as a list of definitions."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    lines = []
    for line in inspect.cleandoc(section).split("\n"):
        name, _, words = line.partition(": ")
        lines += ["", f"``{name}``", f"   {words}"] if line[:1].strip() else [f"   {line.strip()}"]
    return [*lines, ""]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    made: Any = field.default_factory
    return made() if made is not dataclasses.MISSING else "none"


class UrlOptions(_Generated):
    """The options of a transport's URL, with the words of their class."""

    required_arguments = 1

    def lines(self) -> list[str]:
        module, _, name = self.arguments[0].rpartition(".")
        options = getattr(importlib.import_module(module), name)
        fields = [f"``{each.name}={_default(each)!r}``" for each in dataclasses.fields(options)]
        return ["Defaults: " + ", ".join(fields), "", *_attributes(options)]


class Diagram(Directive):
    """A picture of docs/diagrams, in the page's colours, with its text for those who hear it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        file = DIAGRAMS / f"{self.arguments[0]}.txt"
        self.state.document.settings.env.note_dependency(str(file))
        title, picture = read(file)
        svg = draw(picture, title, alone=False)
        figure = f'<figure class="drawing">{svg}<figcaption>{title}</figcaption></figure>'
        return [nodes.raw("", figure, format="html")]


def name_each_attribute(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Give each of several attributes that are explained together a line of its own."""
    del app, what, name, obj, options
    try:
        at = lines.index("Attributes:") + 1
    except ValueError:
        return
    while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
        several = re.fullmatch(r"    (\w+(?:, \w+)+): (.*)", lines[at])
        if several:
            end = at + 1
            while end < len(lines) and lines[end].startswith("     "):
                end += 1
            more = lines[at + 1 : end]
            lines[at:end] = [
                line
                for each in several[1].split(", ")
                for line in (f"    {each}: {several[2]}", *more)
            ]
        at += 1


def name_in_full(app: Sphinx, document: nodes.document) -> None:
    """Let a type that is named as users import it mean that one, whatever else is so called."""
    import fsdpcore

    del app
    for node in list(document.findall(pending_xref)):
        if node.get("refdomain") != "py":
            continue
        if node["reftarget"].islower() and node.get("reftype") in ("obj", "class"):
            node.replace_self(node.children)  # an attribute's name where it is explained
        elif node["reftarget"] in fsdpcore.__all__:
            module = node.get("py:module") or "fsdpcore"
            if not module.startswith("fsdpcore.") or not hasattr(find(module), node["reftarget"]):
                node["reftarget"] = f"fsdpcore.{node['reftarget']}"


def types_as_written(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, returned: str
) -> tuple[str, str] | None:
    """Name types as users import them, in place of what NumPy builds them from."""
    del app, what, name, obj, options
    if not (arguments or returned):
        return None
    return _as_written(arguments or ""), _as_written(returned or "")


def _as_written(text: str) -> str:
    for annotation, name in ((ArrayLike, "ArrayLike"), (DTypeLike, "DTypeLike")):
        text = text.replace(_smart(annotation), name)
    text = text.replace(_smart(NDArray[Any]), "~numpy.ndarray")
    array = r"~numpy\.ndarray\[tuple\[[^]]*\], ~numpy\.dtype\[([^]]*)\]\]"
    text = re.sub(array, r"NDArray[\1]", text)
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def _smart(annotation: Any) -> str:
    return stringify_annotation(annotation, "smart")


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives."""
    app.add_directive("public", Public)
    app.add_directive("command", Command)
    app.add_directive("settings", Settings)
    app.add_directive("url-options", UrlOptions)
    app.add_directive("diagram", Diagram)
    app.connect("autodoc-process-signature", types_as_written)
    app.connect("autodoc-process-docstring", name_each_attribute, priority=100)
    app.connect("doctree-read", name_in_full)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
