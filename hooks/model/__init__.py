"""What a model shows and what it can be asked: hook points, capabilities, inputs."""
