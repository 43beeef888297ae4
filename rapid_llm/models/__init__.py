"""One file per architecture, named as the checkpoint's model_type; config and registry are torch-free data."""
