"""What a policy is trained on: one file per objective, see `specjax.interfaces.Objective`.

To add one, write a file with a frozen dataclass, whose fields are its keys of the section `algo`,
and put it into the table `train.registry.OBJECTIVES`; users name their own as `module:attribute`.
What is the same for all of them (truncated importance sampling, KL to a reference, entropy) is in
`train.loss`; `shared` has what several are made of.
"""
