#!/bin/bash
mkdir in out
mv seed.txt in/
