"""Whether a folder of executables is for a run, asked before anything is imported.

A session asks again, when it knows its weights and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpuport.cli.asked.settings import Settings
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec.choices import with_chosen
from tpuport.core.spec.model_port import BLOCKS, with_blocks
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.spec.model_port import ModelPort
    from tpuport.core.spec.request import Request
    from tpuport.core.spec.variant import Variant


def check_built_for(
    port: ModelPort, variant: Variant | None, settings: Settings
) -> None:
    """Refuse a folder that is not there, or is for other settings than were given.

    Args:
        variant: where it is known; without it the checkpoint tells the form.

    Raises:
        UsageError: upstream's code runs, which has no use for it.
        MissingArtifactError: it is not there.
        ArtifactError: it is damaged, or what differs.
    """
    if settings.executables is None:
        return
    if settings.backend == "diffusers":
        raise UsageError(
            "--executables are not upstream's: leave them out, or use --backend tpuport"
        )
    from tpuport.core.programs.built_folder import BuiltFolder, check_built
    from tpuport.kernels.attention.choice import AttentionChoice

    check_built(settings.executables)
    if variant is None:
        return
    form = with_blocks(port.form_of(variant), settings.blocks or BLOCKS[0])
    mesh = MeshSpec.parse(settings.mesh)
    # What is left to the devices here is not known yet.
    known = settings.mesh is not None and -1 not in (mesh.dp, mesh.sp, mesh.tp)
    BuiltFolder.open(settings.executables, whole=False).check_settings(
        with_chosen(form, settings.implementations),
        attention=AttentionChoice.parse(settings.attention or "auto"),
        sharding=settings.sharding or "default",
        dtype=settings.dtype,
        mesh=mesh.shape if known else None,
    )


def check_built_request(
    port: ModelPort, settings: Settings, request: Request, stages: Sequence[str]
) -> None:
    """Refuse a folder that is for other requests.

    Args:
        port: the form of the model.
        stages: that will run.

    Raises:
        ArtifactError: it is damaged, or what differs.
    """
    if settings.executables is None or settings.backend == "diffusers":
        return
    from tpuport.core.programs.built_folder import BuiltFolder

    compiled = [name for name in stages if name not in settings.op_by_op]
    built = BuiltFolder.open(settings.executables, whole=False)
    built.check_request(request, port, compiled)
