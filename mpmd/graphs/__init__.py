"""From the equations of a jaxpr to graphs: sizes, shardings, forward and backward equations."""
