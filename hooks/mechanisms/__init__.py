"""Which mechanism a head needs: its pattern replaced by an ideal one."""
