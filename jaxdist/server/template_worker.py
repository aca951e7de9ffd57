"""A process of its own that renders chat templates: a template comes with a model, untrusted.

Lines of JSON go in and out. First `{"template"}`, answered by `{"uses"}`, the variables that it
reads; then `{"variables"}`, answered by `{"text"}` or `{"error"}` each time. Jinja's sandbox keeps
the template from the interpreter; the limit on memory keeps it from the machine, and the parent
ends the process when it takes too long. Nothing of jaxdist or JAX is imported here.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

MEMORY = 512 * 2**20  # bytes of address space


class Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks answers for training; here only its text counts."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def environment() -> jinja2.Environment:
    """As transformers sets it up, so that a template gives the same text."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise
    sandbox.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return sandbox


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes characters that are special in HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sandbox, template = environment(), None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if template is None:
                source = request["template"]
                template = sandbox.from_string(source)
                answer = {
                    "uses": sorted(jinja2.meta.find_undeclared_variables(sandbox.parse(source)))
                }
            else:
                answer = {"text": template.render(request["variables"])}
        except Exception as error:  # a template may raise anything; the parent says what it said
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
