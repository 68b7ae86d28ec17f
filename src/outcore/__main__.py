"""``python -m outcore`` is ``outcore``."""


def main() -> None:
    from .cli.main import entry

    entry()


main()
