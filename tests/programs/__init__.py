"""Complete small training steps, each of a kind that people write, to be run in many ways."""

from programs import chains, loops, meshes, models, parameters, randomness, transforms, updates
from programs.program import Program

ALL: tuple[Program, ...] = (
    *chains.PROGRAMS,
    *parameters.PROGRAMS,
    *transforms.PROGRAMS,
    *randomness.PROGRAMS,
    *loops.PROGRAMS,
    *updates.PROGRAMS,
    *models.PROGRAMS,
    *meshes.PROGRAMS,
)

BY_NAME = {program.name: program for program in ALL}
assert len(BY_NAME) == len(ALL)
