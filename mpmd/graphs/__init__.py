"""From the equations of a jaxpr to graphs: their sizes, their shardings, what is forward and what is backward."""
