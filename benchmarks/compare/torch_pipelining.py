"""torch.distributed.pipelining on gloo: each process has one stage, and an optimizer for it."""

import functools

import problem
import torch
import torch.distributed as dist
import torch_models
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def start(task: problem.Problem):
    """The state before the first step, and `step(state, x, y) -> (state, loss)`; only the last rank has a loss."""
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    module = torch_models.Stage(task.name, task.params[rank])
    stage = PipelineStage(module, rank, last + 1, torch.device("cpu"))
    loss = functools.partial(torch_models.loss, task.name)
    schedule = Schedule1F1B(stage, task.num_microbatches, loss_fn=loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=problem.LEARNING_RATE)

    def step(state, x, y):
        losses = []
        optimizer.zero_grad()
        inputs = (torch.from_numpy(x),) if rank == 0 else ()
        target = torch.from_numpy(y) if rank == last else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        return state, sum(loss.detach() for loss in losses) / task.num_microbatches

    return None, step
