"""``torchrun ... -m megatron_async SCRIPT ARGS``: run any Megatron pretrain script, unmodified, with the plugin."""

import os
import sys

_USAGE = """\
usage: torchrun [TORCHRUN ARGS] -m megatron_async SCRIPT [SCRIPT ARGS]

Runs a Megatron pretrain script, unmodified, with the asynchronous pipeline's flags added to it.
For the flags: python -m megatron_async SCRIPT --help
"""


def _main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        sys.exit(f"megatron_async: error: no such script: {script}")
    import megatron_async
    from megatron_async.errors import ConfigurationError

    try:
        megatron_async.install()
    except ConfigurationError as error:
        from megatron_async.patches.arguments import refuse

        refuse(error)
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    # In this module's own namespace, and not through runpy: a process that is spawned from here (a checkpoint saver)
    # imports what `__main__` is by its spec, and must find this module, not run a script without a guard once more.
    namespace = globals()
    namespace["__file__"] = script
    exec(code, namespace)


if __name__ == "__main__":
    _main()
