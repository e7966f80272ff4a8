"""The trainer: its loop, batches as columns, packing, steps, checkpoints.

When is a batch taken, and a version published?     loop.py         _take, _publish_step
How is a batch cut into minibatches?                packing.py      cut_minibatches, cut_microbatches
What does an optimizer step minimize?               objective.py    PolicyObjective
What is the learning rate of this update?           step.py         learning_rate
When does a checkpoint become visible?              checkpoint.py   finish
"""
