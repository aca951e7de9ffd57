"""A template cannot leave its process, hang, or take the machine's memory."""

import asyncio
import time

import pytest

from jaxdist.config import UsageError
from jaxdist.server import template_process
from jaxdist.server.errors import APIError
from jaxdist.server.template_process import TemplateProcess


def render(template, variables=None, *, seconds=5.0, times=1):
    async def main():
        process = TemplateProcess(template, seconds=seconds)
        try:
            await process.start()
            return [await process.render(variables or {}) for _ in range(times)][-1]
        finally:
            await process.close()

    return asyncio.run(main())


def test_templates_render_as_transformers_sets_jinja_up():
    text = render(
        "{% for x in xs %}\n  {{ x | tojson }}\n{% if x == 2 %}{% break %}{% endif %}\n{% endfor %}"
        "{% generation %}<&>{% endgeneration %}{{ strftime_now('%Y') | length }}",
        {"xs": [{"a": "<é>"}, 2, 3]},
    )
    assert text == '  {"a": "<é>"}\n  2\n<&>4'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('only users may speak') }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_what_a_template_may_not_is_refused(template):
    with pytest.raises(APIError, match="template refuses") as info:
        render(template, {"messages": []})
    assert info.value.status == 400


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ messages ** 999999999 }}",
    ],
)
def test_a_template_that_hangs_is_ended(template):
    began = time.monotonic()
    with pytest.raises(APIError, match="longer than 0.5 s"):
        render(template, {"messages": 7}, seconds=0.5)
    assert time.monotonic() - began < 20


def test_a_template_that_takes_all_memory_is_ended():
    with pytest.raises(APIError, match="MemoryError|too much memory"):
        render("{{ 'x' * 10 ** 10 }}")


async def _ended(process):
    process._process.kill()
    await process._process.wait()


def test_who_leaves_while_it_starts_again_leaves_no_answer_to_others():
    async def main():
        process = TemplateProcess("{{ n }}")
        try:
            await process.start()
            for delay in (0, 0.001, 0.01, 0.02, 0.05, 0.1):
                await _ended(process)
                left = asyncio.create_task(process.render({"n": 1}))
                await asyncio.sleep(delay)
                left.cancel()
                assert await process.render({"n": 2}) == "2"
                assert await process.render({"n": 3}) == "3"
        finally:
            await process.close()

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["no time", "no process"])
def test_where_it_does_not_start_again_that_is_said(fault, monkeypatch):
    async def no_process(*_, **__):
        raise BlockingIOError

    async def main():
        process = TemplateProcess("{{ n }}")
        try:
            await process.start()
            await _ended(process)
            with monkeypatch.context() as patch:
                if fault == "no time":
                    patch.setattr(template_process, "_START_SECONDS", 0)
                else:
                    patch.setattr(asyncio, "create_subprocess_exec", no_process)
                with pytest.raises(APIError, match="did not start") as refused:
                    await process.render({"n": 1})
            assert refused.value.status == 503
            assert await process.render({"n": 2}) == "2"
        finally:
            await process.close()

    asyncio.run(main())


def test_it_starts_again_after_an_end():
    async def main():
        process = TemplateProcess(
            "{% if n %}{% for a in range(99999) %}{% for b in range(99999) %}"
            "{% endfor %}{% endfor %}{% endif %}fine",
            seconds=0.5,
        )
        await process.start()
        with pytest.raises(APIError):
            await process.render({"n": 1})
        process._seconds = 20
        text = await process.render({"n": 0})
        await process.close()
        return text

    assert asyncio.run(main()) == "fine"


def test_a_text_that_is_no_template_is_refused_at_the_start():
    with pytest.raises(UsageError, match="template cannot be read"):
        render("{% for %}")
