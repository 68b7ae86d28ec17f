"""A kind of import contract: modules that import nothing of this project but each other. `pyproject.toml` names it."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Closed(Contract):
    """``modules`` import each other alone, of the packages that are looked at."""

    type_name = "closed"
    modules = fields.SetField(subfield=fields.ModuleField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        names = {module.name for module in self.modules}  # type: ignore[attr-defined]
        ours = {name.partition(".")[0] for name in names}
        leaving = [
            f"{name} -> {other}"
            for name in sorted(names)
            for other in sorted(graph.find_modules_directly_imported_by(name))
            if other not in names and other.partition(".")[0] in ours
        ]
        return ContractCheck(kept=not leaving, metadata={"leaving": leaving})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for each in check.metadata["leaving"]:
            output.print_error(f"- {each}")
