"""One base, thousands of tasks, one machine: a folder of deltas as a service over HTTP."""
