"""dmlstudy: Ray-distributed hyperparameter studies for deep metric learning."""
