"""Training on preferences between two answers: conversations, samples, the loss of DPO, the LightningModule."""
