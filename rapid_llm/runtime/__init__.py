"""StepPlan -> tensors -> logits -> ids, on one device."""
