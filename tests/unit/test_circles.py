"""Modules import each other in no circle, also inside functions, but for those with a reason."""

import graphlib

import grimp

REASONS = {
    ("astraflow.models.model_folder", "astraflow.models.folder_judge"): (
        "a process that has torch judges weights itself; any other starts one that imports folder_judge"
    ),
}
"""Imports that close a circle, each with the reason why it stays."""


def test_only_a_config_and_what_it_makes_import_each_other() -> None:
    """A recipe is read without the parts that it names, so a config imports its part when it makes it. The
    part gets the config, and so imports its class."""
    graph = grimp.build_graph("astraflow", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    for module, imported in imports.items():
        if module.endswith(".config"):
            imports[module] = {other for other in imported if not other.startswith(module.rpartition(".")[0])}
    for importer, imported in REASONS:
        imports[importer].remove(imported)
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the circle
