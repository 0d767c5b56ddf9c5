"""Settings of a model on graphs of one's own that is trained in a second."""

SMALL = {
    "model.layers": 1,
    "model.dim": 8,
    "model.heads": 1,
    "model.pe": "none",
    "trainer.epochs": 1,
    "trainer.accelerator": "cpu",
    "optim.warmup_epochs": 0,
}
