"""The objectives of RL, one file each, see `specjax.interfaces.Objective`.

To add one, write a file with a frozen dataclass, whose fields are its keys of the section `algo`,
and put it into the table `train.registry.OBJECTIVES`; users name their own as `module:attribute`.
The terms that all share (truncated importance sampling, KL to a reference, entropy) are in
`train.loss.terms`; `shared` has the parts of several.
"""
