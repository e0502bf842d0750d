"""From devices, shapes and specs to groups of devices (`MpmdMesh`) and the arrays that they hold (`MpmdArray`)."""
